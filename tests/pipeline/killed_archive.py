"""Archive until a step: ``python -m tests.pipeline.killed_archive DATABASE_URL LAKE``, for `tests.kills.killing`."""

import sys
from collections.abc import Callable
from typing import Any

from django_dbtaskqueue.pipeline.lake.archive_jobs import Archive
from tests.kills import serve
from tests.pipeline.executors import ThisProcess


def archive(come_to: Callable[[str], None]) -> None:
    session: Any = ThisProcess()
    options = {"spark": session, "database": sys.argv[1], "lake": sys.argv[2], "older_than": "0s"}
    Archive().run(Archive.context(progress=lambda step, _done, _total: come_to(step), **options))


if __name__ == "__main__":
    serve(archive)
