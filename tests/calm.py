"""``python -m tests.calm --runs 10 --load 6``: run the quick suite again and again, beside so many busy processes.

Each run has an order and a seed of its own. A test that fails without a fault of the product is a defect: each failure
is printed with the command that repeats it. Further arguments go to pytest, such as ``-m "slow and not soak"``.
"""

import argparse
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from xml.etree import ElementTree

from tests.templates import REPOSITORY


def main() -> int:
    """Print each failure as it comes, and a line for each run; return 1 if there was a failure."""
    options, further = _parse()
    failed = 0
    for number in range(1, options.runs + 1):
        seed, began = random.randrange(2**32), monotonic()
        with _load(options.load):
            faults = _run(seed, further)
        said = f"{len(faults)} failures, {monotonic() - began:.0f} s"
        print(f"run {number} of {options.runs}, load {options.load}: {said}", flush=True)
        for test, message in faults:
            print(f"  {test}: {message}\n    pytest '{test}' -p randomly --randomly-seed={seed}", flush=True)
        failed += bool(faults)
    print(f"{options.runs - failed} of {options.runs} runs without a failure beside {options.load} busy processes")
    return int(failed > 0)


def _parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m tests.calm", description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--load", type=int, default=0, help="busy processes beside the tests")
    return parser.parse_known_args()


@contextmanager
def _load(number: int) -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def _run(seed: int, further: list[str]) -> list[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--randomly-seed={seed}", f"--junitxml={report}", *further]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        if not report.exists():
            return [("pytest", f"exit {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")]
        cases = ElementTree.parse(report).iter("testcase")  # noqa: S314 -- pytest has just written it
        faults = [(case, fault) for case in cases for fault in case if fault.tag in ("failure", "error")]
        return [(_place(case), " ".join(fault.get("message", "").split())[:1000]) for case, fault in faults]


def _place(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name', '')}"


if __name__ == "__main__":
    sys.exit(main())
