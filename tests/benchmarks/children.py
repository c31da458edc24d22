"""Other processes: pollers as a user starts them, and workers that begin at a word."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import psutil

from tests.benchmarks.measure import NotRun
from tests.benchmarks.server import REPOSITORY, cpu_of

PATIENCE = 300.0  # seconds


def wait_for(condition: Callable[[], Any], what: str, *, every: float = 0.02, patience: float = PATIENCE) -> int:
    """Look until ``condition()`` is true; return how many looks it took."""
    deadline, pause, looks = monotonic() + patience, threading.Event(), 1
    while not condition():
        if monotonic() > deadline:
            raise TimeoutError(f"{what} has not come true within {patience:.0f} s")
        pause.wait(every)
        looks += 1
    return looks


def tree_cpu(process: psutil.Process) -> float:
    """Return the seconds of CPU of a process and its living children."""
    return cpu_of(process) + sum(map(cpu_of, process.children(recursive=True)))


def memory(process: psutil.Process, name: str = "VmRSS") -> float:
    """Return a process's memory in MiB; ``VmHWM`` is the most it had."""
    text = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+)", text)[1]) / 1024  # type: ignore[index]


def gone(process: psutil.Process) -> bool:
    """Whether a child has ended."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@contextmanager
def started(command: Sequence[str], env: Mapping[str, str] | None = None) -> Iterator[psutil.Process]:
    """Run a program; stop it with SIGTERM at the end. What it said is shown when it failed."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env={**os.environ, **(env or {})}, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            yield psutil.Process(process.pid)
        except BaseException:
            log.seek(0)
            print(log.read()[-2000:], file=sys.stderr)
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def manage(*arguments: str) -> list[str]:
    """Return the command of a Django command."""
    return [sys.executable, "manage.py", *arguments]


def python(module: str, *arguments: str) -> list[str]:
    """Return the command of a module."""
    return [sys.executable, "-m", f"tests.benchmarks.{module}", *arguments]


class Worker:
    """A child that says READY, begins at GO, and at its end says what it measured, in JSON."""

    def __init__(self, *command: str, env: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            command,
            cwd=REPOSITORY, env={**os.environ, **(env or {})}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._expect("READY")

    def go(self) -> None:
        """Let it begin."""
        assert self.process.stdin
        self.process.stdin.write("GO\n")
        self.process.stdin.flush()

    def result(self) -> dict[str, float]:
        """Wait for its end; return what it measured."""
        answer: dict[str, float] = json.loads(self._line())
        self.process.wait(PATIENCE)
        return answer

    def _expect(self, word: str) -> None:
        line = self._line().strip()
        if line != word:
            raise RuntimeError(f"{self.process.args}: {line!r} instead of {word}")

    def _line(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise NotRun(f"its process ended with exit code {self.process.wait(10)}")
        return line


def begin() -> None:
    """In a worker: say READY, wait for GO."""
    print("READY", flush=True)
    sys.stdin.readline()


def finish(**figures: float) -> None:
    """In a worker: say what was measured."""
    print(json.dumps(figures), flush=True)


def together(workers: Sequence[Worker]) -> list[dict[str, float]]:
    """Let them begin at the same time; return what each measured."""
    with ExitStack() as stack:
        for worker in workers:
            stack.callback(worker.process.kill)
        for worker in workers:
            worker.go()
        return [worker.result() for worker in workers]
