"""Other processes: pollers as a user starts them, and workers that begin at a word."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from tests.benchmarks.measure import NotRun
from tests.benchmarks.server import REPOSITORY, cpu_of

PATIENCE = 300.0  # seconds


def tree_cpu(process: psutil.Process) -> float:
    return cpu_of(process) + sum(map(cpu_of, process.children(recursive=True)))


def memory(process: psutil.Process, name: str = "VmRSS") -> float:
    """Return a process's memory in MiB; ``VmHWM`` is the most it had."""
    text = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+)", text)[1]) / 1024  # type: ignore[index]


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@contextmanager
def started(command: Sequence[str], env: Mapping[str, str] | None = None) -> Iterator[psutil.Process]:
    env = os.environ | (env or {})
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=REPOSITORY, env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield psutil.Process(process.pid)
        except BaseException:
            log.seek(0)
            print(log.read()[-2000:], file=sys.stderr)
            raise
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def manage(*arguments: str) -> list[str]:
    return [sys.executable, "manage.py", *arguments]


def python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"tests.benchmarks.{module}", *arguments]


class Worker:
    """A child that says READY, begins at GO, and at its end says what it measured, in JSON."""

    def __init__(self, *command: str, env: Mapping[str, str] | None = None) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, cwd=REPOSITORY, env=os.environ | (env or {}), text=True, **pipes)
        if (line := self._line().strip()) != "READY":
            raise RuntimeError(f"{command}: {line!r} instead of READY")

    def go(self) -> None:
        self.process.stdin.write("GO\n")
        self.process.stdin.flush()

    def result(self) -> dict[str, float]:
        """Wait for its end; return what it measured."""
        answer: dict[str, float] = json.loads(self._line())
        self.process.wait(PATIENCE)
        return answer

    def _line(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            raise NotRun(f"its process ended with exit code {self.process.wait(10)}")
        return line


def begin() -> None:
    print("READY", flush=True)
    sys.stdin.readline()


def finish(**figures: float) -> None:
    print(json.dumps(figures), flush=True)


def together(*workers: Worker) -> list[dict[str, float]]:
    """Let them begin at the same time; return what each measured."""
    with ExitStack() as stack:
        for worker in workers:
            stack.callback(worker.process.kill)
        for worker in workers:
            worker.go()
        return [worker.result() for worker in workers]


def drained(*workers: Worker) -> dict[str, float]:
    """Let them begin at the same time; return their tasks, their CPU, and the seconds from the first to the last."""
    found = together(*workers)
    seconds = max(one["ended"] for one in found) - min(one["began"] for one in found)
    return {"tasks": sum(one["tasks"] for one in found), "cpu": sum(one["cpu"] for one in found), "seconds": seconds}
