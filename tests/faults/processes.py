"""The pollers and producers of a run, their wrong clocks, and what each of their processes needs as time passes."""

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.faults.checkers import Needs
from tests.forks import REPOSITORY as REPOSITORY, Started


class Process:
    """A poller or a producer that the runner keeps alive."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.name, self.command, self._env, self._log = name, command, env, log
        self.starts = 0
        self.start()

    def start(self) -> None:
        self.starts += 1
        self.began, self.began_at = time.monotonic(), time.time()
        self.popen = Started([sys.executable, *self.command], self._env, REPOSITORY, self._log).process

    @property
    def family(self) -> list[psutil.Process]:
        """The process and its children; nothing when it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if self.popen.poll() is None:
                process = psutil.Process(self.popen.pid)
                return [process, *process.children(recursive=True)]
        return []

    @property
    def children(self) -> int:
        """How many processes it has started and not yet lost."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return len(psutil.Process(self.popen.pid).children())
        return 0

    def tail(self, size: int = 300) -> str:
        return self._log.read_text(errors="replace")[-size:].strip()

    def kill(self) -> None:
        for member in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        self.popen.wait(60)


def clock_library(folder: Path) -> Path | None:
    """Build what shifts the time of day that a process reads, and leaves monotonic clocks alone."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    source, built = Path(__file__).with_name("clock.c"), folder / "clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", built, source, "-ldl"], check=True, capture_output=True)
    return built


def shifted(library: Path | None, seconds: float) -> dict[str, str]:
    """Return the environment of a process whose clock, and that of what it starts, is wrong by so many seconds."""
    return {} if library is None else {"LD_PRELOAD": str(library), "FAULTS_CLOCK_S": str(round(seconds))}


def needs(processes: Sequence[Process], clock: float) -> list[Needs]:
    found = []
    for process in processes:
        for number, member in enumerate(process.family):
            with contextlib.suppress(psutil.Error), member.oneshot():
                memory, threads, files = member.memory_info().rss, member.num_threads(), member.num_fds()
                role = process.name if number == 0 else f"{process.name}'s child"
                found.append(Needs(clock, member.pid, role, memory, threads, files))
    return found
