"""The clock that tests set."""

import threading

from tests.clock import SteppedClock


def test_what_passes_between_a_look_and_the_wait_counts() -> None:
    clock = SteppedClock()
    clock.stop()
    due = clock.monotonic() + 60
    left = due - clock.monotonic()
    clock.advance(60)  # by another thread
    assert not clock.wait(threading.Event(), left)
    assert not clock.wait_for(threading.Condition(), lambda: False, 0)
    assert clock.monotonic() == due
