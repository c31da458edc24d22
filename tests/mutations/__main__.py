"""``python -m tests.mutations [WORD ...]``: break the package in one way after the other. Exit code 1: one survived.

``--unbroken`` runs the commands on the package as it is: each of them must pass, or what it notices means nothing.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from tests.mutations.seeded import REPOSITORY, Bug, bugs

AT_A_TIME = 2
OPTIONS = shlex.split("-n 0 -x -q -p no:cacheprovider -p no:randomly --timeout 120")
PASSED, FAILED = 0, 1  # other exit codes of pytest: the command found no test, or could not begin


def run(command: str, bug: Bug | None) -> tuple[int, float, str]:
    """Return the exit code of pytest, the seconds, and the first test that failed, or what was wrong."""
    environment = {name: value for name, value in os.environ.items() if name != "DBTASKQUEUE_MUTATION"}
    if bug is not None:
        environment["DBTASKQUEUE_MUTATION"] = bug.name
    began = time.monotonic()
    words = [sys.executable, "-m", "pytest", *shlex.split(command), *OPTIONS]
    done = subprocess.run(words, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).strip().splitlines()
    told = [line for line in lines if line.startswith(("FAILED ", "ERROR "))] or lines[-1:]
    return done.returncode, time.monotonic() - began, told[0].partition(" - ")[0] if told else ""


def survivors(chosen: Iterable[Bug]) -> list[str]:
    """Run the command of each bug; print what noticed it; return the names of those that nothing noticed."""

    def one(bug: Bug) -> str | None:
        code, seconds, test = run(bug.command, bug)
        verdict = {PASSED: "SURVIVED", FAILED: test}.get(code, f"NOT RUN ({code}): {test}")
        print(f"{seconds:5.1f} s  {bug.place}: {bug.name}: {verdict}", flush=True)
        return None if code == FAILED else bug.name

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return [name for name in pool.map(one, chosen) if name]


def not_green(commands: Iterable[str]) -> list[str]:
    """Run the commands without a bug; return those that do not pass."""
    found = []
    for command in dict.fromkeys(commands):
        code, seconds, test = run(command, None)
        print(f"{seconds:5.1f} s  {command}: {'passed' if code == PASSED else test}", flush=True)
        found += [command] if code != PASSED else []
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="a part of the place or the name of bugs")
    parser.add_argument("--unbroken", action="store_true", help="run the commands without the bugs")
    options = parser.parse_args()
    named = [
        bug for bug in bugs() if not options.words or any(word in f"{bug.place}: {bug.name}" for word in options.words)
    ]
    began = time.monotonic()
    left = not_green(bug.command for bug in named) if options.unbroken else survivors(named)
    words = "commands fail without a bug" if options.unbroken else f"of {len(named)} seeded bugs were not noticed"
    print(f"{len(left)} {words}, in {time.monotonic() - began:.0f} s{': ' if left else '.'}{'; '.join(left)}")
    return 1 if left or not named else 0


if __name__ == "__main__":
    sys.exit(main())
