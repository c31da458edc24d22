"""How many tasks the fetches of a poller may ask for."""

from __future__ import annotations

import pytest

from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.poller.queue_state import Options

pytestmark = pytest.mark.django_db


def test_fetches_under_way_count_for_max_tasks() -> None:
    fetcher = Poller({"work": 1, "other": 1}, Options(max_tasks=5, threads=20)).fetcher
    asked = 0
    while (chosen := fetcher.choose()) is not None:
        asked += chosen[1]
    assert asked == 5
