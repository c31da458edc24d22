"""Run scenarios, print the tables."""

import argparse
import json
import os
import platform
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from tests.benchmarks.measure import take
from tests.benchmarks.report import BEGIN, END, markdown, picture, put_into
from tests.benchmarks.scenarios.cost import cost
from tests.benchmarks.scenarios.drain import drain, limits, sqlite, volume
from tests.benchmarks.scenarios.enqueue import bulk, enqueue
from tests.benchmarks.scenarios.peers import many_peers, peers
from tests.benchmarks.scenarios.pickup import pickup, pinned
from tests.benchmarks.scenarios.pollers import pollers
from tests.benchmarks.server import Server, serving

USUAL = (drain, enqueue, bulk, pickup, volume, pinned, cost, sqlite, peers, many_peers)
SCENARIOS = {one.__name__: one for one in (*USUAL, limits, pollers)}  # the last two are run when they are named


def main() -> None:
    options = _options()
    results, facts = [], {}
    with serving(options.commit_delay) as server:
        for name in options.names or [one.__name__ for one in USUAL]:
            scenario = SCENARIOS[name](server, options.size)
            wanted = [name for name in scenario.cases if options.only in name or "simplest" in name]
            scenario = replace(scenario, cases={name: scenario.cases[name] for name in wanted})
            results.append(result := take(scenario, options.runs))
            facts[name] = {"readings": result.readings, "not run": result.missing}
            if options.json:
                options.json.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
            if options.picture and scenario.picture:
                options.picture.write_text(picture(result))
        report = markdown(results, _setting(server, options))
    print(report)
    if options.into and options.picture:
        place = os.path.relpath(options.picture, options.into.parent)
        report += f"\n![Bars: tasks a second, as pollers, queues, backlog, groups, a snapshot's age grow]({place})\n"
    if options.into:
        options.into.write_text(put_into(options.into.read_text(), report))
    if any(result.failed for result in results):
        raise SystemExit("something failed: see above")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    names = f"Of {', '.join(SCENARIOS)}. Default: not the last two."
    parser.add_argument("names", nargs="*", metavar="NAME", help=names)
    parser.add_argument("--runs", type=int, default=3, help="Readings of each case, in turns (%(default)s).")
    parser.add_argument("--size", type=float, default=1.0, help="Factor of the numbers of tasks (%(default)s).")
    longer = "Milliseconds that each commit takes longer, as on a slower disk (%(default)s)."
    parser.add_argument("--commit-delay", type=float, default=0.0, metavar="MS", help=longer)
    parser.add_argument("--only", default="", metavar="TEXT", help="Only cases named with TEXT; simplest loops.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write all that was measured there.")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="Draw the rates of volume there; --into shows it.")
    parser.add_argument("--into", type=Path, metavar="PAGE", help=f"Put them into a page, between {BEGIN} and {END}.")
    options = parser.parse_args()
    if unknown := {*options.names} - {*SCENARIOS}:
        parser.error(f"no scenario {unknown}: choose from {', '.join(SCENARIOS)}")
    return options


def _setting(server: Server, options: argparse.Namespace) -> str:
    values = ", ".join(f"{name}={value}" for name, value in server.settings.items())
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, Python {platform.python_version()}, PostgreSQL "
        f"{server.embedded.version} (durable commits; {values}), {options.runs} interleaved runs, size "
        f"{options.size:g}; median (least to most)."
    )


if __name__ == "__main__":
    main()
