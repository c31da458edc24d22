"""``python -m tests.faults``: one run with faults from a seed. Exit code 1: a promise was broken."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from tests.faults.runner import Run
from tests.faults.sizes import CI, SOAK, Size


def size_of(minutes: float | None, share: float) -> Size:
    """Return the size of CI, or that of the soak for so many minutes; ``share`` makes it smaller."""
    size = CI if minutes is None else replace(SOAK, seconds=60 * minutes)
    counts = {name: max(1, round(getattr(size, name) * share)) for name in Size.__dataclass_fields__}
    return Size(**{**counts, "seconds": size.seconds * share})


def main() -> int:
    """Run, print the table, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--minutes", type=float, help="Length of a soak. Default: the size that CI runs.")
    parser.add_argument("--share", type=float, default=1.0, help="Part of the size (1.0).")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mutation", help="Break the package by this mutation first.")
    parser.add_argument("--json", type=Path, help="Write the report there, too.")
    options = parser.parse_args()
    report = Run(size_of(options.minutes, options.share), options.seed, mutation=options.mutation).run()
    print(report.table())
    if options.json is not None:
        options.json.write_text(report.json())
    return 1 if report.found else 0


if __name__ == "__main__":
    sys.exit(main())
