"""Observe: tell listeners, signals and the log what is already stored. Nothing here can change an outcome."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from django.dispatch import Signal

from django_dbtaskqueue import signals
from django_dbtaskqueue.core.exceptions import LeaseLost
from django_dbtaskqueue.core.lease import Declared, Lease
from django_dbtaskqueue.core.masking import masked_text
from django_dbtaskqueue.core.outcomes import Outcome, Settlement, said

logger = logging.getLogger("django_dbtaskqueue")

ENDINGS = (signals.task_executed, signals.task_crashed, signals.task_finished)
OF_POLLER = {
    "poller_started": signals.poller_started,
    "poller_executed": signals.poller_executed,
    "poller_idle": signals.poller_idle,
    "poll_failed": signals.poll_failed,
    "poller_finished": signals.poller_stopped,
}
AFTERWARDS = ("poller_executed", "poll_failed", "poller_finished")


def send(signal: Signal, sender: Any, **facts: Any) -> None:
    """Send a signal; log what a receiver raises."""
    if not signal.receivers:
        return
    for receiver, answer in signal.send_robust(sender, **facts):
        if isinstance(answer, Exception):
            logger.error("Signal receiver %r raised", receiver, exc_info=answer)


def watched() -> bool:
    """Whether a listener or a receiver wants to know of each finished task."""
    return bool(signals.registered) or any(signal.receivers for signal in ENDINGS)


def checked_out(leases: Iterable[Lease], processors: Iterable[Declared | None]) -> None:
    """Tasks were checked out; ``processors`` are those that will run them, so that payloads can be decoded."""
    if not signals.registered and not signals.task_checked_out.receivers:
        return
    for lease, processor in zip(leases, processors, strict=True):
        lease.processor = processor
        signals.tell("checked_out", lease)
        send(signals.task_checked_out, lease.queue, task=lease)


def finished(lease: Lease, settlement: Outcome | Settlement | None) -> None:
    """One outcome is stored. None: it is not known here."""
    outcome = None if settlement is None else said(settlement)
    error = None if outcome is None else outcome.facts.error
    if error is not None:
        facts = (lease.id, lease.queue, lease.attempt, lease.max_attempts, _short(error))
        logger.warning("Task %s of %s failed, attempt %s of %s: %s", *facts, extra=fields(lease))
    else:
        signals.tell("executed", lease, outcome, backwards=True)
        send(signals.task_executed, lease.queue, task=lease, outcome=outcome)
    _over(lease, outcome, error)


def started(lease: Lease, processor: Declared) -> None:
    """A processor is about to be called."""
    lease.processor = processor
    if signals.registered:
        signals.tell("started", lease)
    if signals.task_started.receivers:
        send(signals.task_started, lease.queue, task=lease)


def of_poller(hook: str, poller: Any, **facts: Any) -> None:
    """Something happened to a poller (a ``poller.loop.Poller``)."""
    if signals.registered:
        signals.tell(hook, poller, *facts.values(), backwards=hook in AFTERWARDS)
    if OF_POLLER[hook].receivers:
        send(OF_POLLER[hook], poller.instance, poller=poller, **facts)


def _over(lease: Lease, outcome: Outcome | Settlement | None, error: BaseException | str | None) -> None:
    if error is not None:
        signals.tell("crashed", lease, error, backwards=True)
        send(signals.task_crashed, lease.queue, task=lease, error=error)
    signals.tell("finished", lease, backwards=True)
    send(signals.task_finished, lease.queue, task=lease, outcome=outcome, error=error)


def lost(lease: Lease, verb: str) -> None:
    """An outcome came too late and changed nothing."""
    facts = (lease.total_attempt, lease.id, lease.queue, verb)
    logger.warning("Lease %s of task %s of %s is gone; its outcome (%s) changed nothing", *facts, extra=fields(lease))
    send(signals.lease_lost, lease.queue, task=lease, verb=verb)
    _over(lease, None, LeaseLost(lease.id, lease.total_attempt, verb))


def fields(lease: Lease) -> dict[str, Any]:
    """Return what a structured log line says of a task."""
    return {"task_id": lease.id, "queue": lease.queue, "reference": lease.reference, "attempt": lease.attempt}


def _short(error: BaseException | str) -> str:
    try:
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    except BaseException:  # a SystemExit from its text must not end the poller's thread
        text = type(error).__name__
    return masked_text(text[:4000]).replace("\n", " ").replace("\r", " ")[:500]
