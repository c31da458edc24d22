"""A program that acts in forked children, each killed at the place that the program's stdin names."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from subprocess import PIPE

from tests.patience import PATIENCE

KILLED = -signal.SIGKILL


@contextmanager
def killing(module: str, *arguments: str, env: Mapping[str, str] | None = None) -> Iterator[Callable[..., int]]:
    """Run a module that calls `serve`; yield what lets a child act until a place and returns its exit code.

    The first word is the place, or the milliseconds after which the child is killed; the other words are the child's.
    """
    command = [sys.executable, "-m", module, *arguments]
    folder = Path(__file__).parent.parent
    with subprocess.Popen(command, env=env, cwd=folder, stdin=PIPE, stdout=PIPE, text=True) as program:

        def act(*words: str | int) -> int:
            print(*words, file=program.stdin, flush=True)
            return int(program.stdout.readline())

        yield act
        program.communicate(timeout=PATIENCE)


def serve(act: Callable[..., object]) -> None:
    """Obey stdin: ``act`` gets what a child calls with each place that it comes to, and the words of a line."""
    for line in sys.stdin:
        last, *words = line.split()
        child = multiprocessing.get_context("fork").Process(target=act, args=(partial(_come_to, last), *words))
        child.start()
        if last.isdecimal():
            child.join(int(last) / 1000)
            child.kill()
        child.join()
        print(child.exitcode, flush=True)


def _come_to(last: str, place: str) -> None:
    if place == last:
        os.kill(os.getpid(), signal.SIGKILL)
