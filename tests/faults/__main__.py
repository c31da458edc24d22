"""Break everything at once, by a seed, and check every promise. Exit code 1: a promise was broken.

``--mutations`` breaks the package first, in one way after the other, and asks whether a run of the size notices.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from dataclasses import fields, replace
from pathlib import Path

from tests.faults.mutations import NAMES
from tests.faults.runner import Run
from tests.faults.sizes import CI, MUTATED, SMALL, SOAK, Size


def size_of(minutes: float | None, share: float) -> Size:
    """Return the size of CI, or that of the soak for so many minutes; ``share`` makes it smaller."""
    size = CI if minutes is None else replace(SOAK, seconds=60 * minutes)
    counts = {field.name: max(1, round(getattr(size, field.name) * share)) for field in fields(Size)}
    return Size(**counts)


def survivors(options: list[str]) -> list[str]:
    """Run once with each mutation, each in a process of its own; print what noticed it, return what nobody noticed."""
    survived = []
    for name in NAMES:
        with tempfile.NamedTemporaryFile() as file:
            command = [sys.executable, "-m", "tests.faults", *options, "--mutation", name, "--json", file.name]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            text = Path(file.name).read_text()
        if not text:
            found = [f"no run: {done.stderr.strip().splitlines()[-1:]}"]
        else:
            found = [promise for promise, broken in json.loads(text)["violations"].items() if broken]
        if not text or not found:
            survived.append(name)
        print(f"{name:<50} {', '.join(found) or 'SURVIVED'}", flush=True)
    print(f"{len(NAMES) - len(survived)} of {len(NAMES)} mutations were noticed")
    return survived


def main() -> int:
    """Run, print the table, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--minutes", type=float, help="Length of a soak. Default: the size that CI runs.")
    parser.add_argument("--share", type=float, default=1.0, help="Part of the size (1.0).")
    parser.add_argument("--small", action="store_true", help="Run for two minutes, as before a change lands.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="Write the report there, too.")
    parser.add_argument("--mutation", choices=NAMES, help="Break the package in this way first; a small run.")
    parser.add_argument("--mutations", action="store_true", help="Run once for each mutation, and print the score.")
    options = parser.parse_args()
    if options.mutations:
        return len(survivors([f"--seed={options.seed}"]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends with it
    size = MUTATED if options.mutation else SMALL if options.small else size_of(options.minutes, options.share)
    report = Run(size, options.seed, mutation=options.mutation).run()
    print(report.table())
    if options.json is not None:
        options.json.write_text(report.json())
    return 1 if report.found else 0


if __name__ == "__main__":
    sys.exit(main())
