"""Break everything at once, by a seed, and check every promise. Exit code 1: a promise was broken.

``--mutations`` seeds bugs of ``tests/mutations`` in pollers and producers, each in a run that must notice it.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from tests.faults.runner import Run
from tests.faults.sizes import CI, MUTATED, SHORT, SOAK, Size
from tests.mutations.seeded import bugs

NAMES = [bug.name for bug in bugs() if bug.also]
SHARES = 0.4, 1.0  # of the size of a run with a mutation: the second one only if the first noticed nothing


def scaled(size: Size, share: float) -> Size:
    """Return a part of a size. What it has none of stays out of it."""
    return Size(**{name: count and max(1, round(count * share)) for name, count in asdict(size).items()})


def noticed(name: str, options: list[str]) -> list[str]:
    """Run with a mutation, in a process of its own; return the promises that it was seen to break."""
    with tempfile.NamedTemporaryFile() as file:
        command = [sys.executable, "-m", "tests.faults", *options, "--mutation", name, "--json", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        text = Path(file.name).read_text()
    if not text:
        print(f"{name}: no run: {done.stderr.strip().splitlines()[-1:]}")
        return []
    return [promise for promise, broken in json.loads(text)["violations"].items() if broken]


def survivors(options: list[str]) -> list[str]:
    """Run with each mutation, until a run notices it; print what noticed it, return what nobody noticed."""
    survived = []
    for name in NAMES:
        found = next(filter(None, (noticed(name, [*options, f"--share={share}"]) for share in SHARES)), [])
        if not found:
            survived.append(name)
        print(f"{name:<50} {', '.join(found) or 'SURVIVED'}", flush=True)
    print(f"{len(NAMES) - len(survived)} of {len(NAMES)} mutations were noticed")
    return survived


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--minutes", type=float, help="Length of a soak. Default: the size that CI runs.")
    parser.add_argument("--share", type=float, default=1.0, help="Part of the size (1.0).")
    parser.add_argument("--short", action="store_true", help="Run for less than a minute, as before a change lands.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="Write the report there, too.")
    parser.add_argument("--keep", type=Path, help="Leave the evidence and the logs of a broken promise there.")
    parser.add_argument("--mutation", choices=NAMES, help="Break the package in this way first; a small run.")
    parser.add_argument("--mutations", action="store_true", help="Run once for each mutation, and print the score.")
    options = parser.parse_args()
    if options.mutations:
        return len(survivors([f"--seed={options.seed}"]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends with it
    soak = None if options.minutes is None else replace(SOAK, seconds=60 * options.minutes)
    size = MUTATED if options.mutation else SHORT if options.short else soak or CI
    report = Run(scaled(size, options.share), options.seed, options.mutation, options.keep).run()
    print(report.table())
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(report), indent=1))
    return int(any(report.violations.values()))


if __name__ == "__main__":
    sys.exit(main())
