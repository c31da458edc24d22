"""``python -m tests.mutations [WORD ...]``: seed one bug after the other. Exit code 1: one of them was not noticed.

``--unbroken`` runs the commands without bugs. Each must pass, or what it notices means nothing.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from tests.mutations.seeded import REPOSITORY, VARIABLE, bugs

AT_A_TIME = 2
OPTIONS = shlex.split("-n 0 -x -q -p no:cacheprovider -p no:randomly --timeout 120")
VERDICTS = {0: "PASSED", 1: "noticed by"}  # by pytest's exit code; with another one no test has run


def run(title: str, command: str, bug: str) -> int:
    """Run pytest and print what came of it: the first test that failed, or its last line."""
    began = time.monotonic()
    words = [sys.executable, "-m", "pytest", *shlex.split(command), *OPTIONS]
    environment = {**os.environ, VARIABLE: bug}
    done = subprocess.run(words, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).strip().splitlines() or [""]
    told = next((line for line in lines if line.startswith(("FAILED tests/", "ERROR tests/"))), lines[-1])
    verdict = VERDICTS.get(done.returncode, "NOT RUN:")
    print(f"{time.monotonic() - began:5.1f} s  {title}: {verdict} {told.partition(' - ')[0]}", flush=True)
    return done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="a part of the place or the name of bugs")
    parser.add_argument("--unbroken", action="store_true", help="run the commands without the bugs")
    options = parser.parse_args()
    chosen = [bug for bug in bugs() if not options.words or any(word in bug.title for word in options.words)]
    runs = [(bug.title, bug.command, bug.name) for bug in chosen]
    if options.unbroken:
        runs = [(command, command, "") for command in dict.fromkeys(bug.command for bug in chosen)]
    began = time.monotonic()
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        codes = list(pool.map(run, *zip(*runs, strict=True)))
    good = codes.count(0 if options.unbroken else 1)
    words = "commands passed without a bug" if options.unbroken else "seeded bugs were noticed"
    print(f"{good} of {len(runs)} {words}, in {time.monotonic() - began:.0f} s")
    return int(good < len(runs))


if __name__ == "__main__":
    sys.exit(main())
