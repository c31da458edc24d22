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


def main() -> int:
    """Return 0 if both checkers accept the program and refuse the wrong one for its fault."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        wrong = Path(folder) / "wrong_program.py"
        wrong.write_text(WRONG)
        wrong.with_name(CONFIG.name).write_text(CONFIG.read_text().replace("../..", str(REPOSITORY)))
        # The cache of a checkout may be in use by a mypy of its own, as it is in .ci/run; two of them break it.
        mypy = ["mypy", "--config-file", "pyproject.toml", "--cache-dir", f"{folder}/mypy-cache"]
        pyright = ["basedpyright", "--pythonpath", sys.executable, "--project"]
        for checker, right, broken in ((mypy, PROGRAM, wrong), (pyright, CONFIG, wrong.with_name(CONFIG.name))):
            started = monotonic()
            accepted, refused = (_run([*checker, str(what)]) for what in (right, broken))
            print(f"{checker[0]}: {monotonic() - started:.1f} s")
            if accepted.returncode or refused.returncode != 1 or "wrong_program.py:4" not in refused.stdout:
                failed = 1
                print(accepted.stdout, accepted.stderr, "The wrong program:", refused.stdout, sep="\n")
    return failed


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *command]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)


if __name__ == "__main__":
    sys.exit(main())
