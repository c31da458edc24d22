"""The test kit: the true flow on the calling thread's own connection, so that it works inside ``TestCase``.

No part of the queue is replaced. ``drain`` and ``perform`` check out, run and settle as a poller does, but one task
after the other and in the transaction of the test, with which everything is rolled back. All differences from a poller:
leases are not renewed and timeouts not enforced; everything runs on the calling thread, whatever ``executor=`` says;
tasks of every tag are taken; a batch processor gets them one by one; and where a processor breaks the test's own
transaction with a database error, all it wrote in that run is taken back.

Under pytest the fixture ``taskqueue`` has these functions as methods; under unittest ``TaskQueueTestCase`` has them.
"""

from __future__ import annotations

from django.test import TestCase

from django_dbtaskqueue import registry
from django_dbtaskqueue.testing.asserting import Wanted, assert_enqueued, refute_enqueued
from django_dbtaskqueue.testing.clock import advance
from django_dbtaskqueue.testing.polling import run_poller
from django_dbtaskqueue.testing.running import DrainReport, drain, perform

__all__ = [
    "DrainReport",
    "TaskQueueKit",
    "TaskQueueTestCase",
    "Wanted",
    "advance",
    "assert_enqueued",
    "drain",
    "perform",
    "refute_enqueued",
    "run_poller",
]


class TaskQueueKit:
    """The functions of this package as methods; mix it into any ``unittest`` class."""

    advance = staticmethod(advance)
    assert_enqueued = staticmethod(assert_enqueued)
    drain = staticmethod(drain)
    perform = staticmethod(perform)
    refute_enqueued = staticmethod(refute_enqueued)
    run_poller = staticmethod(run_poller)


class TaskQueueTestCase(TaskQueueKit, TestCase):
    """Django's ``TestCase`` with the kit. Processors that a test registers are gone after it."""

    def setUp(self) -> None:
        """Remember the processors."""
        super().setUp()
        self.addCleanup(registry.restore, registry.snapshot())
