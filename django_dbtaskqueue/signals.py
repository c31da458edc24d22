"""Django signals for facts that are already stored. A receiver can never change an outcome; what it raises is logged.

Each is sent with ``send_robust``. ``task`` is the ``Lease``; ``sender`` is the queue's name.
"""

from __future__ import annotations

from django.dispatch import Signal

task_enqueued = Signal()  # queue, task_id, reference
task_started = Signal()  # task
task_finished = Signal()  # task, outcome, error
lease_lost = Signal()  # task, verb
poller_started = Signal()  # poller
poller_stopped = Signal()  # poller
