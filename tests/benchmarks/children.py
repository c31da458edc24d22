"""Other processes: pollers as a user starts them, and workers that begin at a word."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from time import monotonic

from tests.benchmarks.measure import NotRun
from tests.benchmarks.server import REPOSITORY, cpu_of, family
from tests.forks import Program
from tests.patience import PATIENCE

Figures = dict[str, float]
SECONDS = 2.0  # that a producer takes


def tree_cpu(program: Program) -> float:
    return sum(map(cpu_of, family(program.pid)))


def memory(pid: int, name: str = "VmRSS") -> float:
    """Return a process's memory in MiB; ``VmHWM`` is the most it had."""
    return int(re.search(rf"{name}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024  # type: ignore[index]


def manage(*arguments: str) -> list[str]:
    return [sys.executable, "manage.py", *arguments]


def python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"tests.benchmarks.{module}", *arguments]


class Worker:
    """A child that says READY, begins at GO, and at its end says what it measured, in JSON: see ``at_go``."""

    def __init__(self, *command: str, env: Mapping[str, str] | None = None) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, cwd=REPOSITORY, env=os.environ | (env or {}), text=True, **pipes)
        if (line := self._line().strip()) != "READY":
            raise RuntimeError(f"{command}: {line!r} instead of READY")

    def go(self) -> None:
        print("GO", file=self.process.stdin, flush=True)

    def result(self) -> Figures:
        answer: Figures = json.loads(self._line())
        self.process.wait(PATIENCE)
        return answer

    def _line(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            raise NotRun(f"its process ended with exit code {self.process.wait(10)}")
        return line


def at_go(act: Callable[[], Figures]) -> None:
    print("READY", flush=True)
    sys.stdin.readline()
    print(json.dumps(act()), flush=True)


def timed(act: Callable[[], int]) -> Figures:
    """Do something that returns how many tasks it was; return that, its begin and end, and this process's CPU."""
    cpu, began = _cpu(), monotonic()
    return {"tasks": act(), "began": began, "ended": monotonic(), "cpu": _cpu() - cpu}


def _cpu() -> float:
    return sum(one.ru_utime + one.ru_stime for one in map(getrusage, (RUSAGE_SELF, RUSAGE_CHILDREN)))


def together(*workers: Worker) -> list[Figures]:
    """Let them begin at the same time; return what each measured."""
    with ExitStack() as stack:
        for worker in workers:
            stack.callback(worker.process.kill)
        for worker in workers:
            worker.go()
        return [worker.result() for worker in workers]


def drained(*workers: Worker) -> Figures:
    """Let them begin at the same time; return their tasks, their CPU, and the seconds from the first to the last."""
    found = together(*workers)
    seconds = max(one["ended"] for one in found) - min(one["began"] for one in found)
    return {"tasks": sum(one["tasks"] for one in found), "cpu": sum(one["cpu"] for one in found), "seconds": seconds}
