"""What a processor can decide about a task. An outcome is a value: nothing is written until it is settled."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

CENTURY = timedelta(days=36_525)  # later times end where Python's calendar does, and could not be read back


@dataclass(frozen=True, slots=True)
class Complete:
    """The work is done. ``result`` is any JSON value; it is kept in ``result`` and, as text, in ``process_result``."""

    result: Any = None


@dataclass(frozen=True, slots=True)
class CompleteDelete:
    """The work is done and the row is to go, whatever the queue's ``keep`` setting says. The deletion is counted."""


@dataclass(frozen=True, slots=True)
class Reenqueue:
    """The work is not done yet, and that is no failure: back to CREATED, due after ``delay``.

    Without a delay, what a processor returns is due when the ``reenqueue`` policy of its queue or of itself says; the
    policy is called with the number of this reenqueue, from 1, and None. By default there is none ("manual"): the
    attempt then fails with an error that asks for a delay.
    ``reenqueue_attempt`` grows by one and ``attempt`` starts again at 0 unless ``keep_attempts``; of kept attempts the
    last one is given back, so that the task can be taken again. Raises ``TypeError`` or ``ValueError`` for a delay that
    is no ``timedelta`` from zero to a hundred years.
    """

    delay: timedelta | None = None
    result: Any = None
    keep_attempts: bool = False

    def __post_init__(self) -> None:
        if self.delay is not None and not isinstance(self.delay, timedelta):
            raise TypeError(f"Reenqueue(delay={self.delay!r}) needs a timedelta, e.g. timedelta(minutes=5).")
        if self.delay is not None and not timedelta(0) <= self.delay <= CENTURY:
            raise ValueError(f"Reenqueue(delay={self.delay!r}) must be from zero to a hundred years.")


@dataclass(frozen=True, slots=True)
class Fail:
    """This attempt failed, as if the processor had raised.

    Retried by the processor's policy, or after ``delay`` when given, while attempts are left; ERROR after that.
    ``retry=False`` ends in ERROR at once. ``error`` is an exception or a message.
    """

    error: BaseException | str = ""
    delay: timedelta | None = None
    retry: bool = True


@dataclass(frozen=True, slots=True)
class Poison:
    """The task can never succeed: POISON at once, with the reason kept, until an operator decides."""

    reason: str = ""


Outcome = Complete | CompleteDelete | Reenqueue | Fail | Poison
OUTCOMES = (Complete, CompleteDelete, Reenqueue, Fail, Poison)
