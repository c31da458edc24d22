"""``python -m tests.benchmarks.profile``: where a poller's time goes, by py-spy, which looks at it during a drain.

It shows the files and the functions with the most time of their own.
"""

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
def watched(process: psutil.Process, file: Path, options: tuple[str, ...]) -> Iterator[None]:
    """Have py-spy sample a process meanwhile."""
    program = shutil.which("py-spy")
    if program is None:
        raise SystemExit("py-spy is not installed: pip install py-spy")
    command = [program, "record", "-r", "500", "-d", "600", "-f", "raw", "-t", "-p", str(process.pid), "-o", str(file)]
    spy = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        spy.send_signal(signal.SIGINT)
        spy.wait(60)


def own_time(file: Path) -> tuple[Counter[str], Counter[str]]:
    files, functions = Counter[str](), Counter[str]()
    for line in file.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        thread, *frames = stack.split(";")
        if frames:  # otherwise the process ends: it takes its objects apart
            function = frames[-1].rpartition(":")[0]
            files[function.partition(" (")[2]] += int(count)
            functions[f"{function})  [{thread.partition(': ')[2]}]"] += int(count)
    return files, functions


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.profile", description=__doc__)
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--all", action="store_true", help="Every running thread, not only the one with the GIL.")
    options = parser.parse_args()
    with serving() as server, tempfile.TemporaryDirectory() as folder:
        import django

        django.setup()
        file = Path(folder) / "stacks"
        watch = partial(watched, file=file, options=() if options.all else ("--gil",))
        reading = Drain(server, options.tasks, watch=watch)()
        print({name: round(value, 2) for name, value in reading.items()})
        files, functions = own_time(file)
        for name, count in [*files.most_common(20), ("", 0), *functions.most_common(40)]:
            print(f"{count / files.total():6.1%}  {name}")


if __name__ == "__main__":
    main()
