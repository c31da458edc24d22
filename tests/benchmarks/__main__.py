"""Run scenarios, print the tables."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

from tests.benchmarks.measure import Case, Result, Scenario, take
from tests.benchmarks.report import BEGIN, END, markdown, picture, put_into
from tests.benchmarks.server import Server, serving

NAMES = ("drain", "enqueue", "bulk", "pickup", "volume", "pinned", "cost", "sqlite", "peers")
ASKED = ("tuning", "limits", "fan_in", "rows")  # run when they are named
QUICK = 0.2


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, report."""
    options = _options(arguments)
    with serving(options.commit_delay) as server:
        import django

        django.setup()
        results = []
        for name in options.names or NAMES:
            module = import_module(f"tests.benchmarks.scenarios.{name}")
            chosen = _chosen(module.scenario(server, options.size), options)
            results.append(take(chosen, options.runs, lambda text: print(text, file=sys.stderr, flush=True)))
            _write(options, server, results)
        report = markdown(results, _setting(server, options))
    print(report)
    if options.into and options.picture:
        place = os.path.relpath(options.picture, options.into.parent)
        report += f"\n![Bars: tasks per second and most memory of a worker, as what waits or polls grows]({place})\n"
    if options.into:
        options.into.write_text(put_into(options.into.read_text(), report))
    if any(result.failed for result in results):
        raise SystemExit("something failed: see above")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"Of {', '.join(NAMES + ASKED)}. Default: all but the last four."
    )
    parser.add_argument("--runs", type=int, default=3, help="Readings of each case, in turns (%(default)s).")
    parser.add_argument("--size", type=float, default=1.0, help="Factor of the numbers of tasks (%(default)s).")
    parser.add_argument(
        "--commit-delay",
        type=float,
        default=0.0,
        metavar="MS",
        help="Milliseconds that each commit takes longer, as on a slower disk (%(default)s).",
    )
    parser.add_argument("--quick", action="store_true", help=f"One run of a size of {QUICK}.")
    parser.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help="Only cases whose names hold TEXT, and the simplest loop; repeatable.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write all that was measured there.")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="Write the tables there, too.")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="Draw the rates of volume there; --into shows it.")
    parser.add_argument("--into", type=Path, metavar="PAGE", help=f"Put them into a page, between {BEGIN} and {END}.")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in NAMES + ASKED:
            parser.error(f"no scenario {name!r}: choose from {', '.join(NAMES + ASKED)}")
    if options.quick:
        options.runs, options.size = 1, QUICK
    return options


def _chosen(scenario: Scenario, options: argparse.Namespace) -> Scenario:
    def wanted(case: Case) -> bool:
        return any(text in case.name for text in options.only or ("",)) or case.name.startswith("simplest")

    cases = [case for case in scenario.cases if wanted(case)]
    return replace(scenario, cases=cases)


def _setting(server: Server, options: argparse.Namespace) -> str:
    values = ", ".join(f"{name}={value}" for name, value in server.settings.items())
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, Python {platform.python_version()}, PostgreSQL "
        f"{server.version} (durable commits; {values}), {options.runs} interleaved runs, size {options.size:g}; "
        "median (least to most)."
    )


def _write(options: argparse.Namespace, server: Server, results: Sequence[Result]) -> None:
    if options.json:
        facts = {"setting": _setting(server, options), "results": [result.json() for result in results]}
        options.json.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    for result in results:
        if options.picture and result.scenario.picture:
            options.picture.write_text(picture(result))
    if options.markdown:
        options.markdown.write_text(markdown(results, _setting(server, options)))


if __name__ == "__main__":
    main()
