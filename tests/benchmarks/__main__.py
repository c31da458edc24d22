"""Run scenarios, print the tables."""

import argparse
import json
import os
import platform
from dataclasses import replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

from tests.benchmarks.measure import Result, Scenario, take
from tests.benchmarks.report import BEGIN, END, markdown, picture, put_into
from tests.benchmarks.server import Server, serving

NAMES = ("drain", "enqueue", "bulk", "pickup", "volume", "pinned", "cost", "sqlite", "peers")
ASKED = ("tuning", "limits", "rows")  # run when they are named
QUICK = 0.2


def main() -> None:
    options = _options()
    with serving(options.commit_delay) as server:
        import django

        django.setup()
        results = []
        for name in options.names or NAMES:
            module = import_module(f"tests.benchmarks.scenarios.{name}")
            results.append(take(_chosen(module.scenario(server, options.size), options.only), options.runs))
            _keep(options, server, results)
        report = markdown(results, _setting(server, options))
    print(report)
    if options.into and options.picture:
        place = os.path.relpath(options.picture, options.into.parent)
        report += f"\n![Bars: tasks per second and most memory of a worker, as what waits or polls grows]({place})\n"
    if options.into:
        options.into.write_text(put_into(options.into.read_text(), report))
    if any(result.failed for result in results):
        raise SystemExit("something failed: see above")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    known = NAMES + ASKED
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"Of {', '.join(known)}. Default: not the last three.")
    parser.add_argument("--runs", type=int, default=3, help="Readings of each case, in turns (%(default)s).")
    parser.add_argument("--size", type=float, default=1.0, help="Factor of the numbers of tasks (%(default)s).")
    longer = "Milliseconds that each commit takes longer, as on a slower disk (%(default)s)."
    parser.add_argument("--commit-delay", type=float, default=0.0, metavar="MS", help=longer)
    parser.add_argument("--quick", action="store_true", help=f"One run of a size of {QUICK}.")
    only = "Only cases whose names hold TEXT, and the simplest loop; repeatable."
    parser.add_argument("--only", action="append", metavar="TEXT", help=only)
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write all that was measured there.")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="Draw the rates of volume there; --into shows it.")
    parser.add_argument("--into", type=Path, metavar="PAGE", help=f"Put them into a page, between {BEGIN} and {END}.")
    options = parser.parse_args()
    for name in options.names:
        if name not in known:
            parser.error(f"no scenario {name!r}: choose from {', '.join(known)}")
    if options.quick:
        options.runs, options.size = 1, QUICK
    return options


def _chosen(scenario: Scenario, only: list[str] | None) -> Scenario:
    texts = ["simplest", *(only or [""])]
    return replace(scenario, cases=[case for case in scenario.cases if any(text in case.name for text in texts)])


def _setting(server: Server, options: argparse.Namespace) -> str:
    values = ", ".join(f"{name}={value}" for name, value in server.settings.items())
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, Python {platform.python_version()}, PostgreSQL "
        f"{server.version} (durable commits; {values}), {options.runs} interleaved runs, size {options.size:g}; "
        "median (least to most)."
    )


def _keep(options: argparse.Namespace, server: Server, results: list[Result]) -> None:
    if options.json:
        facts = {"setting": _setting(server, options), "results": [result.json() for result in results]}
        options.json.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    for result in results:
        if options.picture and result.scenario.picture:
            options.picture.write_text(picture(result))


if __name__ == "__main__":
    main()
