"""Django signals for facts that are already stored. A receiver can never change an outcome; what it raises is logged.

Each is sent with ``send_robust``, after the hook of ``listeners.Listener`` of the same meaning. ``task`` is the
``Lease`` and ``sender`` the queue's name; of those with a ``poller``, ``sender`` is the poller's instance name.
"""

from __future__ import annotations

from django.dispatch import Signal

# call, task_ids, using: a verb of the API changed tasks, and that is committed. ``call`` is put, take, ack, release,
# fail, touch, bury, kick, reprocess, delete, ttl (taken too late to be started) or lease_expired.
task_changed = Signal()
task_checked_out = Signal()  # task
task_started = Signal()  # task: its processor is about to be called
task_executed = Signal()  # task, outcome: stored, and no Fail
task_crashed = Signal()  # task, error: a failed attempt is stored, or an outcome came too late (LeaseLost)
task_finished = Signal()  # task, outcome, error: the attempt is over; outcome None if the lease was lost
lease_lost = Signal()  # task, verb: an outcome came too late and changed nothing
poller_started = Signal()  # poller
poller_executed = Signal()  # poller, tasks: a checkout took so many
poller_idle = Signal()  # poller: nothing to take, nothing under way
poll_failed = Signal()  # poller, error: one poll failed; the poller goes on
poller_stopped = Signal()  # poller
