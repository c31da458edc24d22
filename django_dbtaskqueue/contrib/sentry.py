"""Sentry: an event for each failed attempt, and check-ins for schedules. Off until ``report()`` is called.

An event has the queue and the task as tags. Payloads and local variables are in no event; secrets in texts are masked.
A schedule that the code declares is a monitor, and each attempt of one of its tasks is a check-in.
"""

import re
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

import sentry_sdk
from sentry_sdk.crons import capture_checkin

from django_dbtaskqueue import signals
from django_dbtaskqueue.core.exceptions import LeaseLost
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.masking import masked
from django_dbtaskqueue.core.outcomes import Outcome
from django_dbtaskqueue.operations.schedules import declared

if TYPE_CHECKING:
    from sentry_sdk._types import Event, Hint, MonitorConfig

__all__ = ["report"]

SCHEDULED_REFERENCE = re.compile(r"(.+)@\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")  # the reference of a schedule's task
MASKED_PARTS = ("exception", "logentry", "message", "extra", "contexts", "breadcrumbs")  # of an event


class Reporter(signals.Listener):
    """Tells Sentry of failed attempts and of schedules."""

    def __init__(self) -> None:
        self._open = WeakKeyDictionary[Lease, str | None]()  # check-ins of attempts; of one given back it goes with it

    def started(self, task: Lease) -> None:
        if found := _monitor(task):
            self._open[task] = capture_checkin(monitor_slug=found[0], status="in_progress", monitor_config=found[1])

    def executed(self, task: Lease, outcome: Outcome) -> None:
        self._check_in(task, "ok")

    def crashed(self, task: Lease, error: BaseException | str) -> None:
        self._check_in(task, "error")
        if isinstance(error, LeaseLost):
            return  # it says nothing of the task: another poller has taken it
        with sentry_sdk.new_scope() as scope:
            scope.set_transaction_name(f"task {task.queue}")
            for name, value in (("queue", task.queue), ("task", task.id), ("attempt", task.attempt)):
                scope.set_tag(f"dbtaskqueue.{name}", str(value))
            if task.reference is not None:
                scope.set_tag("dbtaskqueue.reference", task.reference)
            scope.add_event_processor(_without_secrets)
            if isinstance(error, str):
                sentry_sdk.capture_message(error, level="error")
            else:
                sentry_sdk.capture_exception(error)

    def _check_in(self, task: Lease, status: str) -> None:
        check_in = self._open.pop(task, None)
        if check_in is not None and (found := _monitor(task)):
            capture_checkin(monitor_slug=found[0], check_in_id=check_in, status=status, monitor_config=found[1])


_reporter = Reporter()


def report() -> None:
    """Send failed attempts and check-ins of this process from now on, with the client of ``sentry_sdk.init``.

    Call it once in each process, after ``sentry_sdk.init``; a second call changes nothing.
    """
    signals.register(_reporter)


def _monitor(task: Lease) -> "tuple[str, MonitorConfig] | None":
    """Return the monitor of a task that a schedule in code enqueued: its slug, and when it is expected."""
    found = SCHEDULED_REFERENCE.fullmatch(task.reference or "")
    schedule = declared().get(found[1]) if found else None
    if found is None or schedule is None:
        return None
    slug = re.sub(r"[^a-z0-9_-]+", "-", found[1].lower())[:50]
    return slug, {"schedule": {"type": "crontab", "value": schedule.cron}, "timezone": schedule.timezone}


def _without_secrets(event: "Event", hint: "Hint") -> "Event":
    """Drop the local variables of frames, because payloads are among them, and mask the texts."""
    for error in event.get("exception", {}).get("values", []):
        for frame in (error.get("stacktrace") or {}).get("frames") or ():
            frame.pop("vars", None)
    found: dict[str, object] = {**event}
    return cast("Event", {name: masked(value) if name in MASKED_PARTS else value for name, value in found.items()})
