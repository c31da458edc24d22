"""Observe: tell listeners, signals and the log what is already stored. Nothing here can change an outcome."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from django.dispatch import Signal

from django_dbtaskqueue import signals
from django_dbtaskqueue.core import logger
from django_dbtaskqueue.core.context import trace_id
from django_dbtaskqueue.core.durations import clock, format_seconds
from django_dbtaskqueue.core.exceptions import LeaseLost
from django_dbtaskqueue.core.failure_signature import masked_line
from django_dbtaskqueue.core.lease import Declared, Lease
from django_dbtaskqueue.core.outcomes import Lost, Outcome, Settlement, said

ENDINGS = (signals.task_executed, signals.task_crashed, signals.task_finished)  # of each task
ENDING_TEXTS = {
    "deleted": "completed and deleted",
    "retried": "failed",
    "failed": "failed and is in ERROR",
    "poisoned": "is POISON",
    "suspend": "sleeps or waits for a signal",
    "released": "released uncharged",
}
Fields = dict[str, Any]
SIGNALS = {"poller_finished": "poller_stopped"}  # of hooks with another name
AFTERWARDS = ("poller_executed", "poll_failed", "poller_finished")


def send(signal: Signal, sender: object, **facts: object) -> None:
    """Send a signal; log what a receiver raises."""
    if not signal.receivers:
        return
    for receiver, answer in signal.send_robust(sender, **facts):
        if isinstance(answer, Exception):
            logger.error("Signal receiver %r raised", receiver, exc_info=answer)


def checked_out(leases: Sequence[Lease], processors: Iterable[Declared | None]) -> None:
    """Tasks of one queue were checked out; ``processors`` are those that will run them, to decode their payloads."""
    if leases and leases[0].port.log_level:
        taken(leases)
    if not signals.registered and not signals.task_checked_out.receivers:
        return
    for lease, processor in zip(leases, processors, strict=True):
        lease.processor = processor
        signals.tell("checked_out", lease)
        send(signals.task_checked_out, lease.queue, task=lease)


def ended(
    lease: Lease, result: Settlement | Lost | None, seconds: float | None = None, *, by_code: bool = False
) -> None:
    """Tell what became of a lease (``Lease.result_of``) once its settle is over. The one place that tells it.

    ``seconds``: how long it ran. ``by_code``: code took the lease and knows how it ended, so only the log gets a line.
    """
    if isinstance(result, Lost) and not by_code:
        _lost(lease, result.verb)
    elif isinstance(result, Lost):
        if lease.port.log_level:
            _log(lease, f"lost its lease {lease.total_attempt}", life_fields(lease, "lease_lost"))
    elif not by_code and (result is None or result.facts.counts_as):
        _finished(lease, result, seconds)
    elif result is not None and not result.facts.parks:  # why a task is parked, is logged before
        _log_ending(lease, result, seconds)


def _finished(lease: Lease, settlement: Settlement | None, seconds: float | None) -> None:
    """An attempt ended, and that is stored. None: it is not known here how."""
    outcome = None if settlement is None else said(settlement)
    error = None if settlement is None else settlement.facts.error
    if settlement is not None and error is not None:
        extra = _ending(lease, settlement, seconds)
        text = masked_line(error)
        if lease.port.log_level:
            text += f"; due again at {extra['due_time']}" if extra["due_time"] else "; it is in ERROR"
        facts = (lease.id, lease.queue, lease.attempt, lease.max_attempts, text)
        logger.warning("Task %s of %s failed, attempt %s of %s: %s", *facts, extra=extra)
    else:
        if settlement is not None:
            _log_ending(lease, settlement, seconds)
        signals.tell("executed", lease, outcome, backwards=True)
        send(signals.task_executed, lease.queue, task=lease, outcome=outcome)
    _over(lease, outcome, error)


def started(lease: Lease, processor: Declared) -> None:
    """A processor is about to be called."""
    lease.processor = processor
    if lease.port.log_level:
        lease.begun = clock.monotonic()
        _log(lease, f"started, attempt {lease.attempt} of {lease.max_attempts}", life_fields(lease, "started"))
    if signals.registered:
        signals.tell("started", lease)
    if signals.task_started.receivers:
        send(signals.task_started, lease.queue, task=lease)


def of_poller(hook: str, poller: Any, **facts: Any) -> None:
    """Something happened to a poller (a ``poller.loop.Poller``)."""
    if signals.registered:
        signals.tell(hook, poller, *facts.values(), backwards=hook in AFTERWARDS)
    signal: Signal = getattr(signals, SIGNALS.get(hook, hook))
    if signal.receivers:
        send(signal, poller.instance, poller=poller, **facts)


def _over(lease: Lease, outcome: Outcome | Settlement | None, error: BaseException | str | None) -> None:
    if error is not None:
        signals.tell("crashed", lease, error, backwards=True)
        send(signals.task_crashed, lease.queue, task=lease, error=error)
    signals.tell("finished", lease, backwards=True)
    send(signals.task_finished, lease.queue, task=lease, outcome=outcome, error=error)


def _lost(lease: Lease, verb: str) -> None:
    facts = (lease.total_attempt, lease.id, lease.queue, verb)
    extra = life_fields(lease, "lease_lost")
    logger.warning("Lease %s of task %s of %s is gone; its outcome (%s) changed nothing", *facts, extra=extra)
    send(signals.lease_lost, lease.queue, task=lease, verb=verb)
    _over(lease, None, LeaseLost(lease.id, lease.total_attempt, verb))


# -- the log lines of a task's life: of queues with a ``log_level`` --------------------------------------------------


def taken(leases: Iterable[Lease]) -> None:
    """Log that tasks were checked out."""
    for lease in leases:
        extra = life_fields(lease, "taken")
        waited = "" if extra["wait_seconds"] is None else f", {format_seconds(extra['wait_seconds'])} after it was due"
        _log(lease, f"taken{waited}", extra)


def _log_ending(lease: Lease, settlement: Settlement, seconds: float | None) -> None:
    if not lease.port.log_level:
        return
    extra = _ending(lease, settlement, seconds)
    text: str = ENDING_TEXTS.get(extra["task_event"]) or extra["task_event"]
    if extra["run_seconds"] is not None:
        text += f" after {format_seconds(extra['run_seconds'])}"
    if extra["due_time"] is not None:
        text += f", due again at {extra['due_time']}"
    if reason := settlement.facts.error or getattr(settlement, "reason", ""):
        text += f": {masked_line(reason)}"
    _log(lease, text, extra)


def life_fields(lease: Lease, event: str, seconds: float | None = None, delay: timedelta | None = None) -> Fields:
    """Return the ``extra`` fields of a line of a task's life. All lines have all of them."""
    if seconds is None and lease.begun:
        seconds = clock.monotonic() - lease.begun
    due = None if delay is None else (datetime.now(UTC) + delay).isoformat(timespec="seconds")
    return {
        **fields(lease),
        "task_event": event,
        "wait_seconds": _wait_seconds(lease),
        "run_seconds": None if seconds is None or event in {"taken", "started"} else round(seconds, 6),
        "due_time": due,
        "trace_id": trace_id(lease.context_text),
    }


def _ending(lease: Lease, settlement: Settlement, seconds: float | None) -> Fields:
    event = settlement.facts.counts_as or ("released" if settlement.facts.verb == "release" else settlement.facts.verb)
    return life_fields(lease, event, seconds, getattr(settlement, "delay", None))


def _log(lease: Lease, text: str, extra: Fields) -> None:
    logger.log(lease.port.log_level, "Task %s of %s %s", lease.id, lease.queue, text, extra=extra)


def _wait_seconds(lease: Lease) -> float | None:
    try:
        return round(max(0.0, (lease.start_time - lease.ready_time).total_seconds()), 6)
    except ValueError:  # a time that the database lets pass, but Python does not
        return None


def fields(lease: Lease) -> Fields:
    """Return what a structured log line says of a task."""
    return {"task_id": lease.id, "queue": lease.queue, "reference": lease.reference, "attempt": lease.attempt}
