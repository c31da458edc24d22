"""Observe: tell signals and the log what is already stored. Nothing here can change an outcome."""

from __future__ import annotations

import logging
from typing import Any

from django.dispatch import Signal

from django_dbtaskqueue import signals
from django_dbtaskqueue.lease import Lease
from django_dbtaskqueue.outcomes import Fail

logger = logging.getLogger("django_dbtaskqueue")


def send(signal: Signal, sender: Any, **facts: Any) -> None:
    """Send a signal; log what a receiver raises."""
    if not signal.receivers:
        return
    for receiver, answer in signal.send_robust(sender, **facts):
        if isinstance(answer, Exception):
            logger.error("Signal receiver %r raised", receiver, exc_info=answer)


def watched() -> bool:
    """Whether anybody wants to know of each finished task."""
    return bool(signals.task_finished.receivers)


def finished(lease: Lease, outcome: Any) -> None:
    """One outcome is stored."""
    error = outcome.error if isinstance(outcome, Fail) else None
    if error is not None:
        logger.warning(
            "Task %s of %s failed, attempt %s of %s: %s",
            lease.id,
            lease.queue,
            lease.attempt,
            lease.max_attempts,
            _short(error),
            extra=fields(lease),
        )
    send(signals.task_finished, lease.queue, task=lease, outcome=outcome, error=error)


def started(lease: Lease) -> None:
    """A processor is about to be called."""
    send(signals.task_started, lease.queue, task=lease)


def lost(lease: Lease, verb: str) -> None:
    """An outcome came too late and changed nothing."""
    logger.warning(
        "Lease %s of task %s of %s is gone; its outcome (%s) changed nothing",
        lease.total_attempt,
        lease.id,
        lease.queue,
        verb,
        extra=fields(lease),
    )
    send(signals.lease_lost, lease.queue, task=lease, verb=verb)


def fields(lease: Lease) -> dict[str, Any]:
    """Return what a structured log line says of a task."""
    return {"task_id": lease.id, "queue": lease.queue, "reference": lease.reference, "attempt": lease.attempt}


def _short(error: BaseException | str) -> str:
    try:
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    return text.replace("\n", " ").replace("\r", " ")[:500]
