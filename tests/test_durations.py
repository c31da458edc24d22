"""Durations as text: every form that is read, and what is written is read as the same."""

from argparse import ArgumentTypeError
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
from django.core.exceptions import ImproperlyConfigured
from hypothesis import given, strategies as st

from django_dbtaskqueue import management
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core import durations, retry
from django_dbtaskqueue.core.durations import format_duration, iso_duration, parse_duration
from django_dbtaskqueue.operations.search.values import span_of
from django_dbtaskqueue.pipeline.jobs import objective

MINUTE_AND_A_HALF = timedelta(seconds=90)
READERS: dict[str, Callable[[str], timedelta | None]] = {
    "settings, overrides, API": lambda text: conf.overlay(conf.QueueSettings(), {"lease": text}).lease,
    "retry policy": lambda text: retry.parse_policy(f"fixed:{text},jitter=0")(1, None),
    "command line": management.duration,
    "search": span_of,
    "pipeline": lambda text: objective(f"claims=99%/{text}").within,
}


def test_every_reader_reads_every_form_and_without_a_unit_seconds_or_a_clock() -> None:
    for text in ("90s", "1m30s", "1M 30S", "1.5 m", "PT1M30S", "pt90s", "90000ms"):
        for reader in READERS:
            assert READERS[reader](text) == MINUTE_AND_A_HALF
    for reader in ("settings, overrides, API", "retry policy", "command line", "pipeline"):
        for text in ("90", "00:01:30", "1:30"):
            assert READERS[reader](text) == MINUTE_AND_A_HALF
            assert span_of(text) is None  # in a search it may be a date or a time of day


def test_forms() -> None:
    for text, wanted in [
        *(("0s", timedelta(0)), (" 2 d ", timedelta(days=2))),
        *((text, timedelta(microseconds=12)) for text in ("12us", "12 µs")),
        *((text, timedelta(hours=26)) for text in ("P1DT2H", "1 day, 2:00:00")),
        *((text, timedelta(seconds=-5)) for text in ("-5s", "-00:00:05")),
    ]:
        assert parse_duration(text) == parse_duration(wanted) == wanted


def test_what_is_not_a_duration_is_refused_with_the_forms() -> None:
    for value in (5, 1.5, None, True, ["1m"], "", "soon", "s", "P", "PT", "1..5s", "1" * 101):
        with pytest.raises(ValueError, match=r'is not a duration\. Write numbers with a unit .*"1m30s".*"PT1M30S"'):
            parse_duration(value)
        with pytest.raises(ImproperlyConfigured, match=r"^here: .* is not a duration"):
            conf.duration(value, where="here")


def test_refusals_say_why() -> None:
    for error, read, text, words in [
        (ValueError, parse_duration, "9999999999d", " is longer than the longest duration, 999999999 days"),
        (ValueError, durations.parse_length, "36526d", r" is too long\. Write a duration of at most a hundred years"),
        (ValueError, durations.parse_length, "-5s", r" is negative\. Write a duration of 0 or more"),
        (ImproperlyConfigured, partial(conf.duration, where="'for'"), "999999999d", " is too long"),
        (ArgumentTypeError, management.positive_duration, "0s", " must be more than 0"),
    ]:
        with pytest.raises(error, match=f"'{text}'{words}"):
            read(text)
    assert durations.parse_length("36525d") == timedelta(days=36_525)


@given(st.timedeltas())
def test_what_is_written_is_read_as_the_same(value: timedelta) -> None:
    assert parse_duration(format_duration(value)) == value and parse_duration(iso_duration(value)) == value


@given(st.timedeltas(min_value=timedelta(0)))
def test_a_rough_duration_is_read_and_is_not_more(value: timedelta) -> None:
    read = parse_duration(format_duration(value, rough=True))
    assert read <= value and value - read < max(value / 24, timedelta(microseconds=1))


@given(st.text("0123456789.,:-+dhmsuPT ay", max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found = parse_duration(text)
    except ValueError:
        return
    assert parse_duration(format_duration(found)) == found


def test_spellings() -> None:
    for seconds, exact, rough, iso in [
        *((0, "0s", "0s", "PT0S"), (0.00004, "40µs", "40µs", "PT0.00004S")),
        (0.012345, "12.345ms", "12.3ms", "PT0.012345S"),
        (0.9999, "999.9ms", "999ms", "PT0.9999S"),
        (3.456, "3.456s", "3.45s", "PT3.456S"),
        (59.99, "59.99s", "59.9s", "PT59.99S"),
        (90.5, "1m30.5s", "1m30s", "PT1M30.5S"),
        (252, "4m12s", "4m12s", "PT4M12S"),
        (7265, "2h1m5s", "2h1m", "PT2H1M5S"),
        *((90_000, "1d1h", "1d1h", "P1DT1H"), (31_536_000, "365d", "365d", "P365D")),
        (-90, "-1m30s", "-1m30s", "-PT1M30S"),
    ]:
        value = timedelta(seconds=seconds)
        assert (format_duration(value), durations.format_seconds(seconds), iso_duration(value)) == (exact, rough, iso)
