"""A wrong time of day for a process: a library that shifts what the process reads, and leaves monotonic clocks alone.

The process is started with the variables that ``shifted`` returns. Programs that it starts are shifted, too.
"""

import shutil
import subprocess
from pathlib import Path


def library(folder: Path) -> Path | None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    source, built = Path(__file__).with_name("clock.c"), folder / "clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", built, source, "-ldl"], check=True, capture_output=True)
    return built


def shifted(built: Path | None, seconds: float) -> dict[str, str]:
    """Return the environment of a process whose clock is wrong by so many seconds."""
    return {} if built is None else {"LD_PRELOAD": str(built), "FAULTS_CLOCK_S": str(round(seconds))}
