"""A program that archives in child processes, each killed at a step that its parent reads from stdin.

``python -m tests.pipeline.killed_archive DATABASE_URL LAKE``: for each line ``STEP`` a child runs ``archive`` and kills
itself with SIGKILL as it comes to that step; the program then writes how the child ended.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from django_dbtaskqueue.pipeline.lake.archive_job import Archive
from tests.pipeline.executors import ThisProcess


def child(url: str, lake: str, last: str) -> int:
    """Archive in a forked process until ``last``; return its signal or exit code."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def progress(step: str, _done: int, _total: int) -> None:
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)

    code = 1
    session: Any = ThisProcess()
    try:
        Archive().run(Archive.context(spark=session, database=url, lake=lake, older_than="0s", progress=progress))
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    for line in sys.stdin:
        print(child(*sys.argv[1:], line.strip()), flush=True)
