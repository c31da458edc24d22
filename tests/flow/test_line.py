"""The line as one process remembers it: what was just enqueued is taken at once, what came to stand behind, soon."""

from __future__ import annotations

from datetime import timedelta
from time import monotonic
from typing import Any

import pytest

from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import checkout
from django_dbtaskqueue.flow.settle_port import SettleDoor
from django_dbtaskqueue.models import Task
from tests.factories import make_task

pytestmark = pytest.mark.django_db
PAST, FUTURE = 0.001, float("inf")


def take(line: checkout.Line, limit: int = 10) -> list[int]:
    session = Session.on("default")
    strategy = checkout.strategy_for(session)
    taken: list[Lease] = checkout.take(
        session, line, strategy=strategy, poller_instance="p", limit=limit, lease=timedelta(minutes=1),
        door=SettleDoor("default", Task),
    )  # fmt: skip
    return [lease.id for lease in taken]


def test_on_a_quiet_queue_one_statement_takes_what_came(django_assert_num_queries: Any) -> None:
    """Given a line that was empty at the last walk, then the next task needs no walk, though one is due."""
    line = checkout.Line("parcels")
    first = make_task()
    assert take(line) == [first.pk]
    line.next_walk = checkout.NOW
    assert take(line) == []
    second = make_task()
    line.next_walk = PAST
    with django_assert_num_queries(1):
        assert take(line) == [second.pk]


def test_a_walk_that_is_due_lets_one_checkout_go_first_and_no_more() -> None:
    line = checkout.Line("parcels")
    make_task(ready_time=timedelta(hours=-1))
    assert len(take(line)) == 1
    line.next_walk = line.may_walk = FUTURE
    behind, ahead = make_task(ready_time=timedelta(hours=-2)), [make_task().pk for _ in range(4)]
    line.next_walk = PAST
    assert take(line, 1) == ahead[:1]
    assert take(line, 1) == [behind.pk]
    assert take(line, 9) == ahead[1:]


def test_when_nothing_stands_behind_the_bounds_it_walks_before_it_is_due() -> None:
    line = checkout.Line("parcels")
    make_task(ready_time=timedelta(hours=-1))
    assert len(take(line)) == 1
    behind = make_task(ready_time=timedelta(hours=-2))
    line.next_walk, line.may_walk = FUTURE, FUTURE
    assert take(line) == []
    line.may_walk = PAST
    assert take(line) == [behind.pk]


def test_one_of_those_who_share_a_line_walks_and_the_others_do_not_wait_for_it() -> None:
    """Given two threads that find nothing behind the bounds, then the second returns while the first walks."""
    line, session, walks = checkout.Line("parcels"), Session.on("default"), []
    make_task()

    def take_from(bounds: checkout.Bounds) -> list[Any]:
        walks.append(bounds)
        if len(walks) == 1:
            assert checkout.take_or_walk(line, session, take_from) == []
        return []

    checkout.take_or_walk(line, session, take_from)
    assert len(walks) == 1


@pytest.mark.parametrize(("rows", "pause"), [(0, checkout.WALK_MOST), (100, 0.0)])
def test_a_walk_is_charged_what_it_costs_beyond_a_checkout_of_as_many(rows: int, pause: float) -> None:
    line = checkout.Line("parcels")
    line.learn(seconds=1.0, rows=100)
    began = monotonic() - 1.0
    line.rest(began, rows)
    assert line.may_walk - (began + 1.0) == pytest.approx(pause, abs=0.5)
