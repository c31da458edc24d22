"""Durations as people write them, and back."""

from __future__ import annotations

from datetime import timedelta

import pytest

from django_dbtaskqueue.core.durations import duration, iso, short


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("50ms", "50ms"),
        ("1.5s", "1500ms"),
        ("60s", "1m"),
        ("90s", "90s"),
        ("PT15M", "15m"),
        ("36h", "36h"),
        ("14d", "14d"),
        ("P365D", "365d"),
        ("0s", "PT0S"),
    ],
)
def test_what_is_written_short_is_read_the_same(text: str, written: str) -> None:
    found = duration(text, where="the lease")
    assert short(found) == written
    assert duration(short(found), where="it") == duration(iso(found), where="it") == found


def test_what_no_unit_divides_is_written_in_iso() -> None:
    assert short(timedelta(microseconds=1500)) == "PT0.0015S"
