"""A drain where the database is a file."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import tempfile
from pathlib import Path

from tests.benchmarks.children import Worker, manage, python, started, together, wait_for
from tests.benchmarks.drains import TABLE
from tests.benchmarks.measure import Case, Reading, Scenario, Target
from tests.benchmarks.server import REPOSITORY, Server

SPAN = f"""
SELECT (julianday(max(finish_time)) - julianday(min(start_time))) * 86400.0, count(*) FROM {TABLE}
WHERE status = 'COMPLETED'
"""


def drain(server: Server, tasks: int) -> Reading:
    """Fill a new file and drain it by one process."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tasks.sqlite3"
        env = {"DATABASE_URL": f"sqlite:///{file}"}
        subprocess.run(manage("migrate", "--verbosity", "0"), cwd=REPOSITORY, env=os.environ | env, check=True)
        together([Worker(*python("producer", "many", str(tasks)), env=env)])
        with sqlite3.connect(file, timeout=20) as connection:
            waiting = connection.execute(f"SELECT count(*) FROM {TABLE}").fetchone()[0]
            with server.span() as span, started(manage("runtaskpoller", "--queue", "nothing", "--drain"), env):
                wait_for(lambda: connection.execute(SPAN).fetchone()[1] == waiting, "that all is drained", every=0.2)
            seconds, done = connection.execute(SPAN).fetchone()
    return {"tasks/s": done / seconds, **span.noise}


def scenario(server: Server, size: float) -> Scenario:
    """Return it."""
    cases = [Case("ours", lambda: drain(server, int(20_000 * size)))]
    return Scenario("sqlite", "SQLite, drain", cases, [Target("SQLite ≥ 5,000/s", "ours", "tasks/s", 5000)])
