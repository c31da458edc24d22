"""Ctrl-C ends a run of the tests with everything that it started."""

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

import psutil
import pytest

from tests.conftest import REPOSITORY
from tests.support import PATIENCE, until

NAME = "DBTASKQUEUE_TEST_RUN"  # in the environment of all that the run starts
SUITES = ["tests/pipeline/spark/test_lake.py", "tests/poller/test_supervisor.py"]  # pollers at work, beside Java
STARTED = ["bin/postgres", "bin/java", "manage.py runtaskpoller"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """For the run's own server; PostgreSQL of a run as root works under another account."""
    made = Path(tempfile.mkdtemp(prefix="dbtaskqueue-ctrl-c-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def family(run: str) -> dict[psutil.Process, str]:
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or belongs to another user
            command = shlex.join(process.cmdline())
            ours = run in command or process.environ().get(NAME) == run  # PostgreSQL has its folder, no environment
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found[process] = command
    return found


@pytest.fixture
def run(folder: Path) -> Iterator[str]:
    """The mark of a run; what it leaves is killed."""
    yield str(folder)
    for left in family(str(folder)):
        left.kill()


def test_a_process_that_no_fixture_knows_yet_is_killed(folder: Path, run: str) -> None:
    # Given a Ctrl-C that comes just after a test has started a process
    command = [sys.executable, "-c", "import time; time.sleep(1000)", "manage.py"]
    test = folder / "test_interrupted.py"
    body = f"    subprocess.Popen({command!r})\n    raise KeyboardInterrupt\n"
    test.write_text(f"import subprocess\ndef test_it():\n{body}")
    bare = ("-c", os.devnull, "-p", "no:cacheprovider", "--disable-plugin-autoload")  # plugins take seconds to load
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.suites", *bare, test],
        env=os.environ | {NAME: run}, cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout + done.stderr
    until(lambda: not family(run))


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_running(folder: Path, run: str) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-n", "2", "-m", "", "-p", "no:cacheprovider", *SUITES],
            env=env | {NAME: run, "TMPDIR": str(folder)}, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT,
            # Where the tests run in the background of a shell, it ignores the signal, and children inherit that.
            start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
    until(lambda: process.poll() is not None or all(one in str(family(run)) for one in STARTED), timeout=120)
    os.killpg(process.pid, signal.SIGINT)  # as its terminal does
    assert process.wait(PATIENCE) == pytest.ExitCode.INTERRUPTED, (folder / "log").read_text()
    until(lambda: not family(run))
