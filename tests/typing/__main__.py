"""``python -m tests.typing``: mypy and pyright accept the user's program.

That they can refuse shows in the program itself: each ``ignore`` in it has to be needed. pyright comes as basedpyright,
whose wheel has all it needs; pyright itself downloads its program when it first runs.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic

from tests.architecture.source import REPOSITORY

HERE = Path(__file__).parent


def main() -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as cache:
        # The cache of a checkout may be in use by a mypy of its own, as it is in .ci/run; two of them break it.
        mypy = ["mypy", "--config-file", "pyproject.toml", "--cache-dir", cache, str(HERE / "users_program.py")]
        pyright = ["basedpyright", "--pythonpath", sys.executable, "--project", str(HERE / "pyrightconfig.json")]
        for command in (mypy, pyright):
            started = monotonic()
            done = subprocess.run([sys.executable, "-m", *command], cwd=REPOSITORY, timeout=300, check=False)
            print(f"{command[0]}: {monotonic() - started:.1f} s")
            failed |= done.returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())
