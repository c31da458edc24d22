"""The tables, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from tests.benchmarks.measure import Result, Verdict

BEGIN, END = "<!-- benchmarks -->", "<!-- end of benchmarks -->"


def markdown(results: Iterable[Result], setting: str) -> str:
    """Return the whole report: a table of targets, then one table for each scenario."""
    results = list(results)
    parts = [setting, _targets(results), *[_scenario(result) for result in results]]
    return "\n\n".join(part for part in parts if part) + "\n"


def _targets(results: Sequence[Result]) -> str:
    verdicts = [verdict for result in results for verdict in result.verdicts()]
    if not verdicts:
        return ""
    rows = [[verdict.target.text, _measured(verdict), verdict.words] for verdict in verdicts]
    return "### Targets\n\n" + table(["target", "measured, median (least to most)", "verdict"], rows)


def _measured(verdict: Verdict) -> str:
    values = verdict.values
    if not values:
        return ""
    unit = " times" if verdict.target.against else ""
    return f"{number(verdict.value)}{unit}" + (
        f" ({number(min(values))} to {number(max(values))})" if len(values) > 1 else ""
    )


def _scenario(result: Result) -> str:
    """A table for the cases that measure the same."""
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    for case in result.scenario.cases:
        names = result.figures(case.name)
        if names:
            row = [case.name, *[spread(result.values(case.name, name)) for name in names]]
            groups.setdefault(names, []).append(row)
    tables = [table(["", *names], rows) for names, rows in groups.items()]
    missing = [f"{name}: {reason}." for name, reason in result.missing.items()]
    return "\n\n".join([f"### {result.scenario.title}", *tables, *missing])


def spread(values: Sequence[float]) -> str:
    """Return ``median (least to most)``."""
    if not values:
        return ""
    text = number(statistics.median(values))
    return text if len(values) == 1 else f"{text} ({number(min(values))} to {number(max(values))})"


def put_into(page: str, report: str) -> str:
    """Return a page with the report between its two marks, which stay."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"no {BEGIN} and {END} in the page")
    return f"{before}{begin}\n{report}{end}{after}"


def number(value: float) -> str:
    """Return a figure with as many digits as mean something."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
