"""A child process whose poller is killed while the child begins: it does not load the project first."""

import subprocess
import sys
from functools import partial
from pathlib import Path

from tests.templates import REPOSITORY

POLLER = f"""
import os, signal, sys
import django
django.setup()
from {__name__} import child_of
child_of(sys.argv[1])
os.kill(os.getpid(), signal.SIGKILL)
"""


def child_of(file: str) -> None:
    from django_dbtaskqueue.poller.executors.process import Child

    Child(partial(serve, file))


def serve(file: str, channel: object) -> None:
    Path(file).touch()


def test_a_child_whose_poller_was_killed_serves_nobody(tmp_path: Path) -> None:
    file = tmp_path / "served"
    # The pipe of its output is open until the child has ended.
    subprocess.run([sys.executable, "-c", POLLER, str(file)], cwd=REPOSITORY, capture_output=True, check=False)
    assert not file.exists()
