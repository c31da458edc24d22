"""The Pythons of this machine, and fresh environments with the wheel of this checkout. It needs only Python itself."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

from tests.patience import PATIENCE

REPOSITORY = Path(__file__).resolve().parents[2]
# Prints the version of a Python that can make an environment.
USABLE = "import ensurepip, sqlite3, ssl, sys, venv; print(f'{sys.version_info[0]}.{sys.version_info[1]}')"
# Which Django pip may take with a Python. Where there is no entry: the newest that pip finds.
DJANGO = {"3.11": "Django~=5.2.0", "3.12": "Django~=6.0.0"}


@dataclass(frozen=True)
class Python:
    version: str
    program: str


@cache
def pythons() -> dict[str, Python]:
    """Return one interpreter for each version from 3.11: that of this process, of the PATH, of pyenv, in this order.

    ``STRANGER_PYTHONS`` names more of them, separated like the PATH.
    """
    given = os.environ.get("STRANGER_PYTHONS", "").split(os.pathsep)
    named = (shutil.which(f"python3.{minor}") for minor in range(11, 20))
    pyenv = Path(shutil.which("pyenv") or Path.home() / ".pyenv/bin/pyenv").parent.parent
    found: dict[str, Python] = {}
    for program in chain([sys.executable], given, named, map(str, sorted(pyenv.glob("versions/3.*/bin/python3")))):
        version = _version(program) if program else ""
        if version and tuple(map(int, version.split("."))) >= (3, 11):
            found.setdefault(version, Python(version, program))
    return dict(sorted(found.items(), key=lambda item: tuple(map(int, item[0].split(".")))))


def main() -> int:
    """Print the program of each Python; return 1 if the version that is asked for is not among them."""
    print(*(f"{one.version} {one.program}" for one in pythons().values()), sep="\n")
    return 0 if set(sys.argv[1:]) <= set(pythons()) else 1


def _version(program: str) -> str:
    try:
        done = subprocess.run([program, "-c", USABLE], capture_output=True, text=True, timeout=PATIENCE, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def build_wheel(folder: Path, source: Path = REPOSITORY) -> Path:
    """Build the wheel of this checkout, or of another source; the source itself stays as it is."""
    execute([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), str(source)])
    (wheel,) = folder.glob("*.whl")
    return wheel


def make_environment(python: Python, wheel: Path, folder: Path) -> dict[str, str]:
    """Make a virtual environment with nothing but pip; return the variables of a shell in which it is active.

    In it ``pip install`` takes this project from the wheel, and Django as the pair wants it. A warning is an error.
    """
    execute([python.program, "-m", "venv", str(folder)])
    constraints = folder / "constraints.txt"
    wanted = DJANGO.get(python.version, "Django>=6.0")
    constraints.write_text(f"django-dbtaskqueue=={wheel.name.split('-')[1]}\n{wanted}\n")
    hidden = {"PYTHONPATH", "PYTHONHOME", "DJANGO_SETTINGS_MODULE", "DATABASE_URL", "PYTEST_ADDOPTS"}
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    active = {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "VIRTUAL_ENV": str(folder)}
    pip = {"PIP_CONSTRAINT": str(constraints), "PIP_FIND_LINKS": str(wheel.parent)}
    return kept | active | pip | dict.fromkeys(("PIP_QUIET", "PIP_DISABLE_PIP_VERSION_CHECK", "PYTHONUNBUFFERED"), "1")


def execute(command: list[str], *, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, env=env, cwd=cwd, text=True, timeout=PATIENCE, check=False, **output)
    assert done.returncode == 0, f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}"
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
