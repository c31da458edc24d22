"""Ctrl-C ends a run of the tests with everything that it started."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from tests.conftest import REPOSITORY
from tests.patience import PATIENCE
from tests.support import eventually, until

NAME = "DBTASKQUEUE_TEST_RUN"  # in the environment of all that the run starts
SUITES = ["tests/chaos/test_stop.py", "tests/pipeline/spark", "tests/browser/test_road.py", "tests/poller"]
STARTED = ["bin/postgres", "bin/java", "manage.py runtaskpoller"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """For the run's own server; PostgreSQL of a run as root works under another account."""
    made = Path(tempfile.mkdtemp(prefix="dbtaskqueue-ctrl-c-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def family(run: str) -> list[psutil.Process]:
    """Return the processes that the run has started, and itself."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or belongs to another user
            if process.environ().get(NAME) == run and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def lines(run: str) -> list[str]:
    """Return their command lines."""
    found = []
    for process in family(run):
        with suppress(psutil.Error):
            found.append(shlex.join(process.cmdline()))
    return found


def has_all(run: str) -> bool:
    return all(any(program in line for line in lines(run)) for program in STARTED)


def nothing_of(run: str) -> None:
    assert lines(run) == []


def test_a_process_that_no_fixture_knows_yet_is_killed(folder: Path) -> None:
    # Given a Ctrl-C that comes just after a test has started a process
    run = str(uuid4())
    command = [sys.executable, "-c", "import time; time.sleep(1000)", "manage.py"]
    test = folder / "test_interrupted.py"
    test.write_text(
        f"import subprocess\ndef test_it():\n    subprocess.Popen({command!r})\n    raise KeyboardInterrupt\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "tests.suites", "-p", "no:cacheprovider", "-c", os.devnull, test],
            env=os.environ | {NAME: run}, cwd=REPOSITORY, capture_output=True, text=True, check=False,
        )  # fmt: skip
        # Then the run ends, and the process does, too
        assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout + done.stderr
        eventually(lambda: nothing_of(run))
    finally:
        for left in family(run):
            left.kill()


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_running(folder: Path) -> None:
    # Given a run of the tests in two processes that has started servers, pollers and Spark
    run = str(uuid4())
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    env |= {NAME: run, "TMPDIR": str(folder)}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-n", "2", "-m", "", "-p", "no:cacheprovider", *SUITES],
            env=env, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            # Where the tests run in the background of a shell, it ignores the signal, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        try:
            until(lambda: process.poll() is not None or has_all(run), timeout=120)
            # When somebody presses Ctrl-C in its terminal
            os.killpg(process.pid, signal.SIGINT)
            # Then it ends, and nothing stays
            assert process.wait(PATIENCE) == pytest.ExitCode.INTERRUPTED, (folder / "log").read_text()
            eventually(lambda: nothing_of(run))
        finally:
            for left in family(run):
                left.kill()
