"""A drain where the database is a file."""

import os
import sqlite3
import subprocess
import tempfile

from tests.benchmarks.children import Worker, manage, python, together
from tests.benchmarks.drains import TABLE
from tests.benchmarks.measure import Case, Reading, Scenario, Target
from tests.benchmarks.server import REPOSITORY, Server

SPAN = f"""
SELECT (julianday(max(finish_time)) - julianday(min(start_time))) * 86400.0, count(*) FROM {TABLE}
WHERE status = 'COMPLETED'
"""


def drain(server: Server, tasks: int) -> Reading:
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/tasks.sqlite3"
        env = {"DATABASE_URL": f"sqlite:///{file}"}

        def run(*command: str) -> None:
            subprocess.run(manage(*command), cwd=REPOSITORY, env=os.environ | env, check=True)

        run("migrate", "--verbosity", "0")
        together(Worker(*python("producer", "many", str(tasks)), env=env))
        with server.span() as span:
            run("runtaskpoller", "--queue", "nothing", "--drain")
        with sqlite3.connect(file) as connection:
            seconds, done = connection.execute(SPAN).fetchone()
    if done < tasks:
        raise RuntimeError(f"only {done} of {tasks} tasks were completed")
    return {"tasks/s": done / seconds, **span.noise}


def scenario(server: Server, size: float) -> Scenario:
    cases = [Case("ours", lambda: drain(server, int(20_000 * size)))]
    return Scenario("sqlite", "SQLite, drain", cases, [Target("SQLite ≥ 5,000/s", "ours", "tasks/s", 5000)])
