"""Where a poller's time goes: py-spy looks at it during a drain, from outside.

``python -m tests.benchmarks.profile`` drains once with py-spy and shows the functions with the most time of their own.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil

from tests.benchmarks.drains import Drain
from tests.benchmarks.server import serving


@contextmanager
def watched(process: psutil.Process, file: Path, *, gil: bool) -> Iterator[None]:
    """Have py-spy sample a process meanwhile; ``gil``: only what holds the interpreter."""
    program = shutil.which("py-spy")
    if program is None:
        raise SystemExit("py-spy is not installed: pip install py-spy")
    command = [program, "record", "-r", "500", "-d", "600", "-f", "raw", "-t", "-p", str(process.pid), "-o", str(file)]
    spy = subprocess.Popen([*command, *(["--gil"] if gil else [])], stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        spy.send_signal(signal.SIGINT)
        spy.wait(60)


def own_time(file: Path) -> Counter[str]:
    """Return the samples of each function in each thread, without those of the functions it called."""
    found: Counter[str] = Counter()
    for line in file.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        thread, *frames = stack.split(";")
        if not frames:  # the process ends: it takes its objects apart
            continue
        function = frames[-1].rpartition(":")[0] + ")"
        found[f"{function}  [{thread.partition(': ')[2]}]"] += int(count)
    return found


def by_module(samples: Counter[str]) -> Counter[str]:
    """Return the samples of each file, of all threads."""
    found: Counter[str] = Counter()
    for name, count in samples.items():
        found[name.partition(" (")[2].partition(")")[0]] += count
    return found


def main() -> None:
    """Drain one queue and print the profile."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.profile", description=__doc__)
    parser.add_argument("--queue", default="nothing")
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--all", action="store_true", help="Every running thread, not only the one with the GIL.")
    parser.add_argument("--raw", type=Path, help="Keep py-spy's stacks there, e.g. for a flame graph.")
    options = parser.parse_args()
    with serving() as server, tempfile.TemporaryDirectory() as folder:
        import django

        django.setup()
        file = options.raw or Path(folder) / "stacks"
        watch = partial(watched, file=file, gil=not options.all)
        reading = Drain(server, options.tasks, queues=[options.queue], watch=watch)()
        print({name: round(value, 2) for name, value in reading.items()})
        samples = own_time(file)
        total = samples.total()
        print(f"{total} samples")
        for name, count in [*by_module(samples).most_common(20), ("", 0), *samples.most_common(40)]:
            print(f"{count / total:6.1%}  {name}")


if __name__ == "__main__":
    main()
