"""The functions of the test kit as methods: a mixin for ``unittest``, and a ``TestCase``."""

from __future__ import annotations

from django.test import TestCase

from django_dbtaskqueue import registry
from django_dbtaskqueue.testing.asserting import assert_enqueued, refute_enqueued
from django_dbtaskqueue.testing.clock import advance
from django_dbtaskqueue.testing.polling import run_poller
from django_dbtaskqueue.testing.running import drain, perform


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
