"""The harness itself: that it tells met from missed, and that every scenario still runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.__main__ import SCENARIOS
from tests.benchmarks.drains import lost_at_the_start
from tests.benchmarks.measure import Case, NotRun, Reading, Scenario, Target, take
from tests.benchmarks.report import BEGIN, END, markdown, picture, put_into
from tests.conftest import REPOSITORY


def readings(*values: float) -> Case:
    return ({"tasks/s": value} for value in values).__next__


def test_a_figure_is_compared_run_by_run_and_a_limit_is_a_least_or_a_most() -> None:
    cases = {"raw": readings(10, 20, 5), "ours": readings(11, 24, 4)}
    (verdict,) = take(Scenario("drain", "Drain", cases, [Target("more", "ours", "tasks/s", 1.2, "raw")]), 3).verdicts()
    assert (sorted(verdict.values), verdict.words) == ([0.8, 1.1, 1.2], "missed by 8%")
    limits = ((5, False, "met"), (20, False, "missed by 50%"), (5, True, "missed by 100%"), (10, True, "met"))
    targets = [Target("limit", "ours", "tasks/s", limit, most=most) for limit, most, _ in limits]
    verdicts = take(Scenario("x", "X", {"ours": readings(10)}, targets), 1).verdicts()
    assert [verdict.words for verdict in verdicts] == [words for *_, words in limits]


def test_what_cannot_run_says_why_and_stops_nothing() -> None:
    def refuse() -> Reading:
        raise NotRun("node is not installed")

    cases = {"pg-boss": refuse, "ours": readings(1000, 1200, 1100)}
    text = markdown([take(Scenario("x", "Title", cases, [Target("t", "pg-boss", "tasks/s", 1)]), 3)], "Here.")
    assert "| ours | 1,100 (1,000 to 1,200) |" in text and "pg-boss: node is not installed." in text
    assert "| t |  | not measured: node is not installed |" in text


def test_a_report_is_put_between_its_marks_and_has_a_picture() -> None:
    assert put_into(f"before\n{BEGIN}\nold\n{END}\nafter\n", "new\n") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    with pytest.raises(ValueError, match="no <!-- benchmarks -->"):
        put_into("page", "new")
    figures = {"tasks/s": 4321.0, "µs CPU worker": 7.0, "µs CPU PostgreSQL": 13.5, "rows walked/task": 2.5}
    cases = dict.fromkeys(("few", "many"), lambda: figures | {"MiB worker": 72.0})
    drawn = {"Backlog": {"less": "few", "more": "many", "most": "not run"}}
    text = picture(take(Scenario("x", "X", cases, picture=drawn), 1))
    assert text.count(">4,321/s, 20 µs, 2.5 rows, 72 MiB<") == 2 and ">Backlog<" in text and ">more<" in text


def test_the_time_lost_at_the_start_is_what_the_first_tenth_took_longer() -> None:
    steady = [(at / 100, 500) for at in range(1, 21)]
    assert lost_at_the_start(0.0, steady) == pytest.approx(0)
    assert lost_at_the_start(-0.15, steady) == pytest.approx(150)


@pytest.mark.bench
@pytest.mark.timeout(1800)
def test_every_scenario_runs(tmp_path: Path) -> None:
    """With hardly any tasks: it says nothing about speed."""
    file = tmp_path / "all.json"
    options = ["--runs", "1", "--size", "0.01", "--json", str(file)]
    env = {name: value for name, value in os.environ.items() if name not in ("DATABASE_URL", "DJANGO_SETTINGS_MODULE")}
    command = [sys.executable, "-m", "tests.benchmarks", *SCENARIOS, *options]
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(file.read_text())
    assert list(results) == list(SCENARIOS)
    ours = [case for name, one in results.items() for case in one["not run"] if "ours" in case or "peers" not in name]
    assert not ours, done.stderr[-4000:]
