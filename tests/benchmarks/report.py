"""The tables, in Markdown."""

import statistics
from collections.abc import Iterable, Sequence

from tests.benchmarks.measure import Result

BEGIN, END = "<!-- benchmarks -->", "<!-- end of benchmarks -->"


def markdown(results: Sequence[Result], setting: str) -> str:
    parts = [setting, _targets(results), *[_scenario(result) for result in results]]
    return "\n\n".join(part for part in parts if part) + "\n"


def _targets(results: Sequence[Result]) -> str:
    verdicts = [verdict for result in results for verdict in result.verdicts()]
    if not verdicts:
        return ""
    rows = [
        [one.target.text, spread(one.values, " times" if one.target.against else ""), one.words] for one in verdicts
    ]
    return "### Targets\n\n" + table(["target", "measured, median (least to most)", "verdict"], rows)


def _scenario(result: Result) -> str:
    """A table for the cases whose first figure is the same."""
    groups: dict[str, list[str]] = {}
    for case in result.scenario.cases:
        if names := result.figures(case.name):
            groups.setdefault(names[0], []).append(case.name)
    tables = []
    for cases in groups.values():
        names = tuple(dict.fromkeys(name for case in cases for name in result.figures(case)))
        rows = [[case, *[spread(result.values(case, name)) for name in names]] for case in cases]
        tables.append(table(["", *names], rows))
    missing = [f"{name}: {reason}." for name, reason in result.missing.items()]
    return "\n\n".join([f"### {result.scenario.title}", *tables, *missing])


def picture(result: Result) -> str:
    figures = [
        (name, [statistics.median(result.values(name, figure)) for figure in ("tasks/s", "MiB worker")])
        for name in result.scenario.picture
        if result.values(name, "tasks/s")
    ]
    longest, bars = max([rate for _, (rate, _) in figures], default=1.0), []
    for index, (name, (rate, memory)) in enumerate(figures):
        y, width = 32 * index, 330 * rate / longest
        bars.append(f'<text x="300" y="{y + 21}" text-anchor="end">{name}</text>')
        bars.append(f'<rect x="310" y="{y + 4}" width="{width:.0f}" height="24" fill="#4a90c2"/>')
        bars.append(f'<text x="{width + 318:.0f}" y="{y + 21}">{number(rate)}/s, {number(memory)} MiB</text>')
    # Read on light and on dark pages alike.
    size = f'viewBox="0 0 820 {32 * len(figures)}" font-family="sans-serif" font-size="14" fill="#777"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', *bars, "</svg>", ""])


def spread(values: Sequence[float], unit: str = "") -> str:
    if not values:
        return ""
    text = number(statistics.median(values)) + unit
    return text if len(values) == 1 else f"{text} ({number(min(values))} to {number(max(values))})"


def put_into(page: str, report: str) -> str:
    """Return a page with the report between its two marks, which stay."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"no {BEGIN} and {END} in the page")
    return f"{before}{begin}\n{report}{end}{after}"


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
