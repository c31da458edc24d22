"""``python -m tests.typing``: mypy and pyright accept the user's program, and refuse a wrong one.

pyright comes as basedpyright, whose wheel has all it needs; pyright itself downloads its program when it first runs.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic

from tests.architecture.source import REPOSITORY

PROGRAM = Path(__file__).with_name("users_program.py")
CONFIG = Path(__file__).with_name("pyrightconfig.json")
WRONG = """
from typing import assert_type
from django_dbtaskqueue.models import Task
assert_type(Task.objects.filter(queue="mail").reprocess(), str)
"""


def mypy(program: Path, folder: Path) -> list[str]:
    # The cache of a checkout may be in use by a mypy of its own, as it is in .ci/run; two of them break it.
    cache = folder / "mypy-cache"
    return ["mypy", "--config-file", str(REPOSITORY / "pyproject.toml"), "--cache-dir", str(cache), str(program)]


def pyright(program: Path, _: Path) -> list[str]:
    config = program.with_name("pyrightconfig.json")
    if not config.exists():
        config.write_text(CONFIG.read_text().replace("../..", str(REPOSITORY)))
    return ["basedpyright", "--project", str(config), "--pythonpath", sys.executable]


def main() -> int:
    """Return 0 if both checkers accept the program and refuse the wrong one for its fault."""
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        wrong = Path(folder) / "wrong_program.py"
        wrong.write_text(WRONG)
        for checker in (mypy, pyright):
            started = monotonic()
            right, broken = (_run(checker(program, Path(folder))) for program in (PROGRAM, wrong))
            refused = broken.returncode == 1 and "wrong_program.py:4" in broken.stdout
            print(f"{checker.__name__}: {monotonic() - started:.1f} s")
            if right.returncode or not refused:
                failed = True
                print(right.stdout, right.stderr, "" if refused else f"A wrong program passes:\n{broken.stdout}")
    return int(failed)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *command]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)


if __name__ == "__main__":
    sys.exit(main())
