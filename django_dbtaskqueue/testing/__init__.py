"""The test kit: the true flow on the calling thread's own connection, so that it works inside ``TestCase``.

No part of the queue is replaced. ``drain`` and ``perform`` fetch and settle by a poller's own code, but one call of a
processor after the other and in the transaction of the test, with which everything is rolled back. All differences from
a poller: leases are not renewed and timeouts not enforced; everything runs on the calling thread, whatever
``executor=`` says; and where a processor breaks the test's own transaction, all it wrote in that run is taken back.

Names are resolved on first use, because pytest imports this package before Django is set up.

Under pytest the fixture ``taskqueue`` has these functions as methods; under unittest ``TaskQueueTestCase`` has them.
"""

from typing import TYPE_CHECKING

from django_dbtaskqueue.core import lazy_names

if TYPE_CHECKING:
    from django_dbtaskqueue.testing.backend_conformance import TaskBackendConformance
    from django_dbtaskqueue.testing.kit import (
        DrainReport,
        TaskQueueKit,
        TaskQueueTestCase,
        Wanted,
        advance,
        assert_enqueued,
        drain,
        perform,
        refute_enqueued,
        run_poller,
    )

__all__ = [
    "DrainReport", "TaskBackendConformance", "TaskQueueKit", "TaskQueueTestCase", "Wanted", "advance",
    "assert_enqueued", "drain", "perform", "refute_enqueued", "run_poller",
]  # fmt: skip

__getattr__, __dir__ = lazy_names(__name__, {"kit": __all__, "backend_conformance": ["TaskBackendConformance"]})
