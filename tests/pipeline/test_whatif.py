"""Queues replayed: against formulas, against themselves, and from real rows."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from django_dbtaskqueue.core.exceptions import JobOptionError
from django_dbtaskqueue.pipeline.reports.whatif import Arrival, WhatIf, most_at_once, replay


def tenths(attempt: int) -> timedelta:
    return timedelta(seconds=10 * attempt)


def waits(*arrivals: Arrival, slots: int = 1) -> list[float]:
    return [one.wait for one in replay(arrivals, slots=slots, back_off=tenths)]


def test_tasks_wait_for_a_slot_in_their_order_and_a_lower_number_goes_first() -> None:
    assert waits(Arrival(0, 5), Arrival(1, 5), Arrival(2, 5)) == [0, 4, 8]
    assert waits(Arrival(0, 5), Arrival(1, 5), Arrival(2, 5), slots=2) == [0, 0, 3]
    assert waits(Arrival(0, 5), Arrival(100, 5)) == [0, 0]
    assert waits(Arrival(0, 5), Arrival(1, 5), Arrival(2, 5, priority=-1)) == [0, 9, 3]


def test_a_failed_task_comes_back_after_its_delay_and_others_go_meanwhile() -> None:
    first, other = replay([Arrival(0, 2, failures=2), Arrival(1, 1)], slots=1, back_off=tenths)
    assert (first.wait, first.lead) == (0, 2 + 10 + 2 + 20 + 2)
    assert (other.wait, other.lead) == (1, 2)
    (given_up,) = replay([Arrival(0, 2, failures=2)], slots=1, back_off=lambda _attempt: None)
    assert given_up.lead == 2


@settings(max_examples=50, deadline=None)
@given(
    arrivals=st.lists(
        st.builds(Arrival, st.floats(0, 100), st.floats(0.1, 20), st.integers(0, 2), st.integers(-1, 1)), max_size=30
    ),
    slots=st.integers(1, 4),
)
def test_no_task_is_lost_and_never_do_more_run_than_there_are_slots(arrivals: list[Arrival], slots: int) -> None:
    served = replay(arrivals, slots=slots, back_off=tenths)
    assert len(served) == len(arrivals)
    for arrival, one in zip(arrivals, served, strict=True):
        assert one.wait >= 0
        ran, paused = arrival.run * (arrival.failures + 1), 10 * sum(range(1, arrival.failures + 1))
        assert one.lead >= one.wait + ran + paused - 1e-6
    once = [
        (arrival.time + one.wait + 1e-9, arrival.time + one.lead)
        for arrival, one in zip(arrivals, served, strict=True)
        if not arrival.failures
    ]
    assert most_at_once(once) <= slots


def test_it_agrees_with_the_queueing_formula() -> None:
    """M/M/1 at half load: the mean wait is as long as the mean run."""
    chance, time, arrivals = random.Random(7), 0.0, []
    for _ in range(60_000):
        time += chance.expovariate(0.5)
        arrivals.append(Arrival(time, chance.expovariate(1.0)))
    served = replay(arrivals, slots=1, back_off=tenths)
    assert sum(one.wait for one in served) / len(served) == pytest.approx(1.0, rel=0.1)


def test_the_most_at_once_counts_what_touches_as_apart() -> None:
    assert most_at_once([(0, 1), (1, 2)]) == 1
    assert most_at_once([(0, 2), (1, 3), (1, 4)]) == 3
    assert most_at_once([]) == 1


def test_what_is_to_be_other_must_be_said() -> None:
    with pytest.raises(JobOptionError, match="Give --slots, --forecast, --priority or --back-off"):
        WhatIf().run(WhatIf.context(lake="nowhere"))
    with pytest.raises(JobOptionError, match="--priority: 'high' is not a whole number"):
        WhatIf.context(priority="mails=high")
    with pytest.raises(JobOptionError, match="--back-off: 'slow' is not a retry policy"):
        WhatIf.context(back_off="slow")
