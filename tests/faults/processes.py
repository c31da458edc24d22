"""The pollers and producers of a run, and what each of their processes needs as time passes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.faults.checkers import Needs

REPOSITORY = Path(__file__).resolve().parents[2]
END_S = 60.0


class Process:
    """A poller or a producer that the runner keeps alive."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.name, self.command, self._env, self._log = name, command, env, log
        self.starts = 0
        self.began = self.began_at = 0.0  # monotonic, and the time of day
        self.start()

    def start(self) -> None:
        """Start it, or start it again."""
        self.starts += 1
        self.began, self.began_at = time.monotonic(), time.time()
        with self._log.open("ab") as log:
            self.popen = subprocess.Popen(
                [sys.executable, *self.command],
                env=self._env,
                cwd=REPOSITORY,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def family(self) -> list[psutil.Process]:
        """The process and its children; nothing when it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if self.popen.poll() is None:
                process = psutil.Process(self.popen.pid)
                return [process, *process.children(recursive=True)]
        return []

    @property
    def children(self) -> list[psutil.Process]:
        """The processes that it started itself."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.popen.pid).children()
        return []

    def tail(self, size: int = 300) -> str:
        """Return the end of its log."""
        return self._log.read_text(errors="replace")[-size:].strip()

    def kill(self) -> None:
        """End it and its children, at once."""
        for member in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        self.popen.wait(END_S)


def needs(processes: Sequence[Process], clock: float) -> list[Needs]:
    """Return what each process of each family holds now."""
    found = []
    for process in processes:
        for number, member in enumerate(process.family):
            with contextlib.suppress(psutil.Error), member.oneshot():
                memory, threads, files = member.memory_info().rss, member.num_threads(), member.num_fds()
                role = process.name if number == 0 else f"{process.name}'s child"
                found.append(Needs(clock, member.pid, role, memory, threads, files))
    return found
