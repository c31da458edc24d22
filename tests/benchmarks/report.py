"""The tables, in Markdown."""

import statistics
from collections.abc import Iterable, Sequence

from tests.benchmarks.measure import Result

BEGIN, END = "<!-- benchmarks -->", "<!-- end of benchmarks -->"


def markdown(results: Sequence[Result], setting: str) -> str:
    parts, verdicts = [setting], [verdict for result in results for verdict in result.verdicts()]
    if verdicts:
        rows = [[one.text, spread(values, " times" if one.against else ""), words] for one, values, words in verdicts]
        parts += ["### Targets", table(["target", "measured, median (least to most)", "verdict"], rows)]
    for result in results:
        parts += [f"### {result.scenario.title}", *_tables(result)]
        parts += [f"{name}: {reason}." for name, reason in result.missing.items()]
    return "\n\n".join(parts) + "\n"


def _tables(result: Result) -> Iterable[str]:
    groups: dict[str, list[str]] = {}
    for case in result.scenario.cases:
        if names := result.figures(case):
            groups.setdefault(names[0], []).append(case)
    for cases in groups.values():
        names = tuple(dict.fromkeys(name for case in cases for name in result.figures(case)))
        yield table(["", *names], [[case, *[spread(result.values(case, name)) for name in names]] for case in cases])


def picture(result: Result) -> str:
    """Bars of tasks a second, for each thing that grows; the same scale everywhere."""
    middle = {
        case: {name: statistics.median(result.values(case, name)) for name in result.figures(case)}
        for case in result.readings
    }
    most = max((of["tasks/s"] for of in middle.values()), default=0.0)
    parts, y = [], 0
    for axis, cases in result.scenario.picture.items():
        parts.append(f'<text x="300" y="{y + 24}" text-anchor="end" font-weight="bold">{axis}</text>')
        for label, case in cases.items():
            if (of := middle.get(case)) is None:
                continue
            y += 32
            cpu = of["µs CPU worker"] + of["µs CPU PostgreSQL"]
            figures = f"{number(of['tasks/s'])}/s, {cpu:.0f} µs, {of['rows walked/task']:.1f} rows"
            width = 240 * of["tasks/s"] / most
            parts.append(f'<text x="300" y="{y + 21}" text-anchor="end">{label}</text>')
            parts.append(f'<rect x="310" y="{y + 4}" width="{width:.0f}" height="24" fill="#4a90c2"/>')
            parts.append(f'<text x="{width + 318:.0f}" y="{y + 21}">{figures}, {of["MiB worker"]:.0f} MiB</text>')
        y += 40
    # Read on light and on dark pages alike.
    size = f'viewBox="0 0 820 {y}" font-family="sans-serif" font-size="14" fill="#777"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', *parts, "</svg>", ""])


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
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])
