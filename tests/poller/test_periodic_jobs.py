"""The jobs that a poller's threads run from time to time."""

from __future__ import annotations

import pytest

from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.poller.periodic import Periodic, PeriodicThread
from tests.support import until


@pytest.mark.django_db(transaction=True)
def test_a_job_that_fails_is_tried_again_after_a_pause() -> None:
    def fail() -> float:
        raise ValueError("as asked")

    job = Periodic("default", "failing", fail)
    thread = PeriodicThread("Jobs", "test-jobs", [job], last=(), retry=(600.0, 600.0), timeout=60.0)
    thread.start()
    until(lambda: job.due)
    assert job.due > clock.monotonic()
    thread.stop()
