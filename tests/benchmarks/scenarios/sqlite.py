"""A drain where the database is a file."""

import os
import sqlite3
import subprocess
import tempfile
from pathlib import Path

from tests.benchmarks.children import PATIENCE, Worker, manage, python, started, together
from tests.benchmarks.drains import TABLE
from tests.benchmarks.measure import Case, Reading, Scenario, Target
from tests.benchmarks.server import REPOSITORY, Server

SPAN = f"""
SELECT (julianday(max(finish_time)) - julianday(min(start_time))) * 86400.0, count(*) FROM {TABLE}
WHERE status = 'COMPLETED'
"""


def drain(server: Server, tasks: int) -> Reading:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tasks.sqlite3"
        env = {"DATABASE_URL": f"sqlite:///{file}"}
        subprocess.run(manage("migrate", "--verbosity", "0"), cwd=REPOSITORY, env=os.environ | env, check=True)
        together(Worker(*python("producer", "many", str(tasks)), env=env))
        with server.span() as span, started(manage("runtaskpoller", "--queue", "nothing", "--drain"), env) as process:
            process.wait(PATIENCE)
        with sqlite3.connect(file) as connection:
            seconds, done = connection.execute(SPAN).fetchone()
    if done < tasks:
        raise RuntimeError(f"only {done} of {tasks} tasks were completed")
    return {"tasks/s": done / seconds, **span.noise}


def scenario(server: Server, size: float) -> Scenario:
    cases = [Case("ours", lambda: drain(server, int(20_000 * size)))]
    return Scenario("sqlite", "SQLite, drain", cases, [Target("SQLite ≥ 5,000/s", "ours", "tasks/s", 5000)])
