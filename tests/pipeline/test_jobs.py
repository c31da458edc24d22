"""The frame of the jobs: options, the list of jobs, progress, and how errors are told."""

from __future__ import annotations

import inspect
import io
import json
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from django_dbtaskqueue.core.exceptions import CheckFailed, JobOptionError, PipelineError
from django_dbtaskqueue.pipeline import jobs
from django_dbtaskqueue.pipeline.jobs import JOBS, Argument, Objective, by_queue, complete, job, objective
from django_dbtaskqueue.pipeline.lake import Lake
from django_dbtaskqueue.pipeline.spark import terminal
from django_dbtaskqueue.pipeline.spark.terminal import shown_on
from tests.factories import make_task
from tests.pipeline.lakes import MEANWHILE
from tests.pipeline.test_command import as_typed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import ProcessDatabase


@pytest.mark.parametrize("name", JOBS)
def test_every_job_says_what_it_is(name: str) -> None:
    found = job(name)
    assert found.name == name
    assert found.summary
    assert inspect.getdoc(type(found))
    assert all(one.help for one in found.arguments)
    defaults = found.context(**{one.name: "x" for one in found.arguments if one.required}).options
    text = found.explain(defaults)
    assert text.startswith(f"{name}: {found.summary}")
    assert all(one.flag in text for one in found.arguments)


def test_an_unknown_job_is_named_with_its_nearest() -> None:
    with pytest.raises(JobOptionError, match=r"reprot: there is no such job\. Did you mean 'report'"):
        job("reprot")


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (jobs.moment, "2026-01-31", datetime(2026, 1, 31, tzinfo=UTC)),
        (jobs.moment, "2026-01-31T08:00+01:00", datetime(2026, 1, 31, 7, tzinfo=UTC)),
        (jobs.day, "2026-01-31", date(2026, 1, 31)),
        (jobs.count, "12", 12),
        (jobs.share, "99.5%", 0.995),
        (jobs.share, "0.5", 0.5),
        (jobs.pair, "a=b=c", ("a", "b=c")),
        (objective, "claims=99.9%/5m", Objective("claims", 0.999, timedelta(minutes=5))),
        (objective, "*=99%", Objective("*", 0.99)),
    ],
)
def test_text_becomes_a_value(read: Callable[[str], Any], text: str, value: object) -> None:
    assert read(text) == (pytest.approx(value) if isinstance(value, float) else value)


@pytest.mark.parametrize(
    ("read", "text", "reason"),
    [
        (jobs.moment, "tomorrow", "is not a time. Write it as 2026-01-31"),
        (jobs.day, "31.1.", "is not a day. Write it as 2026-01-31"),
        (jobs.count, "0", "is not a whole number of at least 1"),
        (jobs.share, "120%", "is not a share"),
        (jobs.share, "much", "is not a share"),
        (jobs.pair, "a", "is not NAME=VALUE"),
        (objective, "99%", 'is not an objective. Write it as "claims=99.9%/5m"'),
    ],
)
def test_a_wrong_text_is_explained(read: Callable[[str], Any], text: str, reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        read(text)
    assert text in str(caught.value) and reason in str(caught.value)


def test_options_get_their_defaults_and_types() -> None:
    known = (
        Argument("rate", "", type=jobs.count, default=5),
        Argument("queue", "", many=True),
        Argument("mode", "", choices=("a", "b")),
        Argument("dry", "", type=bool, default=False),
    )
    assert complete(known, {"queue": "x"}) == {"rate": 5, "queue": ("x",), "mode": None, "dry": False}
    assert complete(known, {"queue": ["x", "y"], "rate": "7"})["rate"] == 7
    with pytest.raises(JobOptionError, match="--mode: 'c' is not one of a, b"):
        complete(known, {"mode": "c"})
    with pytest.raises(JobOptionError, match="--name: it is needed: who"):
        complete((Argument("name", "who", required=True),), {})


def test_a_queue_s_own_objective_wins_over_everybody_s() -> None:
    found = by_queue([Objective("*", 0.5), Objective("claims", 0.9)])
    assert (found["claims"].share, found["*"].share) == (0.9, 0.5)
    assert by_queue([])["*"].share == 0.99
    assert str(Objective("a", 0.999, timedelta(minutes=5))) == "99.9% within 5m"


def test_progress_off_a_terminal_is_a_line_for_each_tenth() -> None:
    stream = io.StringIO()
    with shown_on(stream) as progress:
        for done in range(101):
            progress("copying", done, 100)
        progress("counting", 0, 0)
        progress("counting", 0, 0)
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["copying: 0 of 100", "copying: 10 of 100"]
    assert (len(lines), lines[-1]) == (12, "counting")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_a_bar_that_goes_away() -> None:
    pytest.importorskip("rich")
    stream = Terminal()
    with shown_on(stream) as progress:
        progress("copying", 5, 10)
    assert "copying" in stream.getvalue()
    quiet = Terminal()
    with shown_on(quiet, quiet=True) as progress:
        progress("copying", 5, 10)
    assert quiet.getvalue() == ""


@pytest.mark.parametrize(
    "text",
    [
        "connection to postgresql://me:sesame@db/x failed",
        "host=db password=sesame user=me",
        "host=db password='sesame street' user=me",
    ],
)
def test_no_error_tells_a_password(text: str) -> None:
    said = terminal.one_paragraph(psycopg.OperationalError(text))
    assert "sesame" not in said and "***" in said
    assert said.startswith("The database says: ")


def test_an_error_is_one_paragraph() -> None:
    assert terminal.one_paragraph(PipelineError("Do this instead.")) == "Do this instead."
    assert terminal.one_paragraph(KeyError("a\n\tb")) == r"KeyError: 'a\n\tb'."
    assert terminal.one_paragraph(ValueError("first\n  second")) == "ValueError: first second."


def test_a_result_is_plain_json() -> None:
    value = {"when": datetime(2026, 1, 1, tzinfo=UTC), "long": timedelta(minutes=2), "no": float("nan"), 1: (1, "a")}
    expected = {"when": "2026-01-01T00:00:00+00:00", "long": 120.0, "no": None, "1": [1, "a"]}
    assert json.loads(jobs.as_json(value)) == expected


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    jobs.write_whole(tmp_path / "new" / "a.json", "x")
    assert (tmp_path / "new" / "a.json").read_text() == "x"
    with pytest.raises(PipelineError, match="cannot be written"):
        jobs.write_whole(tmp_path / "new" / "a.json" / "b", "x")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]


def test_a_failed_check_keeps_what_it_found() -> None:
    assert CheckFailed("Two terminal.", {"faults": 2}).result == {"faults": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("check", "3 tasks checked\nno findings\n"),
        ("forecast --since 30d --no-store", "to keep 95 % of the waits"),
        ("whatif --slots 2 --no-store", "would have waited"),
        ("replay --lake LAKE", "enqueued: 0\n"),
        ("erase --reference r0 --lake LAKE", "tasks: 1 -> 0\n"),
    ],
)
def test_a_job_begins_in_a_process_of_its_own(
    sqlite_process_database: ProcessDatabase, folder: Path, words: str, said: str
) -> None:
    """There no other test has started Spark. The other jobs do so on a cluster, as a stream, in an upgrade."""
    Lake.at(folder, create=True)
    for number in range(3):
        make_task("COMPLETED", finish_time=-timedelta(days=number + 1), reference=f"r{number}", **MEANWHILE)
    code, out, err = as_typed(sqlite_process_database, *words.replace("LAKE", str(folder)).split())
    assert (code, err) == (0, "")
    assert said in out
