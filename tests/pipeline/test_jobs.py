"""The frame of the jobs: options, the list of jobs, progress, and how errors are told."""

import inspect
import io
import json
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from django_dbtaskqueue.core.exceptions import JobOptionError, PipelineError
from django_dbtaskqueue.pipeline import jobs
from django_dbtaskqueue.pipeline.jobs import JOBS, Argument, Objective, by_queue, complete, job, objective
from django_dbtaskqueue.pipeline.spark import terminal
from django_dbtaskqueue.pipeline.spark.terminal import shown_on
from tests.poller.test_logs import Terminal


def test_every_job_says_what_it_is() -> None:
    for name in JOBS:
        found = job(name)
        assert found.name == name
        assert found.summary and inspect.getdoc(type(found)), name
        assert all(one.help for one in found.arguments), name
        defaults = found.context().options
        text = found.explain(defaults)
        assert text.startswith(f"{name}: {found.summary}")
        assert all(one.flag in text for one in found.arguments), name


VALUES: list[tuple[Callable[[str], Any], str, object]] = [
    (jobs.moment, "2026-01-31", datetime(2026, 1, 31, tzinfo=UTC)),
    (jobs.moment, "2026-01-31T08:00+01:00", datetime(2026, 1, 31, 7, tzinfo=UTC)),
    (jobs.day, "2026-01-31", date(2026, 1, 31)),
    (jobs.count, "12", 12),
    (jobs.share, "99.5%", pytest.approx(0.995)),
    (jobs.share, "0.5", 0.5),
    (jobs.pair, "a=b=c", ("a", "b=c")),
    (objective, "claims=99.9%/5m", Objective("claims", 0.999, timedelta(minutes=5))),
    (objective, "*=99%", Objective("*", 0.99)),
]
WRONG: list[tuple[Callable[[str], Any], str, str]] = [
    (jobs.moment, "tomorrow", "is not a time. Write it as 2026-01-31"),
    (jobs.day, "31.1.", "is not a day. Write it as 2026-01-31"),
    (jobs.count, "0", "is not a whole number of at least 1"),
    (jobs.share, "120%", "is not a share"),
    (jobs.share, "much", "is not a share"),
    (jobs.pair, "a", "is not NAME=VALUE"),
    (objective, "99%", 'is not an objective. Write it as "claims=99.9%/5m"'),
]


def test_text_becomes_a_value_or_is_explained() -> None:
    assert [read(text) for read, text, _ in VALUES] == [value for _, _, value in VALUES]
    for read, text, reason in WRONG:
        with pytest.raises(ValueError, match=re.escape(reason)) as caught:
            read(text)
        assert text in str(caught.value)


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


def test_an_error_is_one_paragraph_and_tells_no_password() -> None:
    for secret in ("postgresql://me:sesame@db/x failed", "password=sesame user=me", "password='sesame street' user=me"):
        said = terminal.one_paragraph(psycopg.OperationalError(f"host=db {secret}"))
        assert "sesame" not in said and "***" in said
        assert said.startswith("The database says: ")
    assert terminal.one_paragraph(PipelineError("Do this instead.")) == "Do this instead."
    assert terminal.one_paragraph(KeyError("a\n\tb")) == r"KeyError: 'a\n\tb'."
    assert terminal.one_paragraph(ValueError("first\n  second")) == "ValueError: first second."


def test_a_result_is_plain_json_in_a_file_that_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    value = {"when": datetime(2026, 1, 1, tzinfo=UTC), "long": timedelta(minutes=2), "no": float("nan"), 1: (1, "a")}
    expected = {"when": "2026-01-01T00:00:00+00:00", "long": 120.0, "no": None, "1": [1, "a"]}
    assert json.loads(jobs.as_json(value)) == expected
    jobs.write_whole(tmp_path / "new" / "a.json", "x")
    assert (tmp_path / "new" / "a.json").read_text() == "x"
    with pytest.raises(PipelineError, match="cannot be written"):
        jobs.write_whole(tmp_path / "new" / "a.json" / "b", "x")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]
