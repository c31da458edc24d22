"""A real poller beside a test whose rows are committed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

from django.db import connections

from django_dbtaskqueue.core.exceptions import TaskQueueError
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import aliases_of
from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.poller.queue_state import Options

PATIENCE = timedelta(seconds=30)


@contextmanager
def run_poller(
    *queues: str, threads: int = 2, coroutines: int = 20, timeout: timedelta = PATIENCE, using: str | None = None
) -> Iterator[Poller]:
    """Run a real poller of ``queues``, on threads and connections of its own, for as long as the block lasts.

    At the end of the block it goes on until nothing is due, being processed, or due within five seconds, like
    ``runtaskpoller --drain``; ``AssertionError`` when that takes longer than ``timeout``. After an exception in the
    block it stops at once. It sees only what is committed: for ``TransactionTestCase`` and
    ``django_db(transaction=True)``; elsewhere ``TaskQueueError`` (use ``drain``).
    """
    _refuse_transaction({alias for queue in queues for alias in aliases_of(queue, using)})
    poller = Poller(dict.fromkeys(queues, 1), Options(threads=threads, coroutines=coroutines), using=using)
    poller.start()
    try:
        yield poller
        _drain(poller, timeout)
    finally:
        poller.stop()
        if not poller.wait(timeout.total_seconds()):
            poller.cancel()
        poller.close()
        notify.flush()


def _refuse_transaction(aliases: set[str]) -> None:
    for alias in aliases:
        if connections[alias].in_atomic_block:
            raise TaskQueueError(
                f"run_poller() has connections of its own, which see nothing of the open transaction on {alias!r}. "
                "Use TransactionTestCase or @pytest.mark.django_db(transaction=True), or drain() instead."
            )


def _drain(poller: Poller, timeout: timedelta) -> None:
    poller.options = poller.fetcher.capacity.options = replace(poller.options, drain=True)
    poller.wake("")
    if not poller.wait(timeout.total_seconds()):
        running = [f"{run.job.lease.queue}/{run.job.lease.reference or run.job.lease.id}" for run in poller.running()]
        state = f"{poller.state}, running {', '.join(running) or 'nothing'}"
        raise AssertionError(f"The poller of {', '.join(poller.queues)} was not done after {timeout}: {state}.")
