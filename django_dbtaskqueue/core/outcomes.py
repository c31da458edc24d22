"""What a processor can decide about a task. An outcome is a value: nothing is written until it is settled."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import ClassVar, NamedTuple

from django_dbtaskqueue.core.durations import MAX_DELAY
from django_dbtaskqueue.core.states import SIGNAL


class Facts(NamedTuple):
    """What code that does not write an outcome needs to know of it."""

    verb: str  # in messages and signals
    counts_as: str  # in the metrics; "" if it does not count as an attempt
    call: str  # in the usage counters
    wakes: bool = False  # the task may be due again soon
    deletes_or_returns: bool = False  # afterwards the row does not show this outcome
    parks: bool = False
    error: BaseException | str | None = None


COMPLETE_FACTS = Facts("complete", "completed", "ack")  # of nearly every outcome


@dataclass(frozen=True, slots=True)
class Complete:
    """The work is done. ``result`` is any JSON value, which the task keeps."""

    facts: ClassVar[Facts] = COMPLETE_FACTS

    result: object = None
    text: str | None = field(default=None, init=False, repr=False, compare=False)  # of the result, once decided


@dataclass(frozen=True, slots=True)
class CompleteDelete:
    """The work is done and the row is deleted, also if the queue's ``keep`` setting is another. It is counted."""

    facts: ClassVar[Facts] = Facts("completedelete", "deleted", "ack", deletes_or_returns=True)


@dataclass(frozen=True, slots=True)
class Reenqueue:
    """The work is not done yet. This is not a failure: the task is CREATED again and due after ``delay``.

    Without a delay, the ``reenqueue`` policy of the queue or the processor gives it, called with the number of this
    reenqueue, from 1, and None; by default there is none, and the attempt fails with an error that asks for a delay.
    ``reenqueue_attempt`` grows by one and ``attempt`` starts again at 0 unless ``keep_attempts``; of kept attempts the
    last one is given back. Raises ``TypeError`` or ``ValueError`` unless ``delay`` is a ``timedelta`` up to 100 years.
    """

    facts: ClassVar[Facts] = Facts("reenqueue", "reenqueued", "reenqueue", wakes=True)
    delay: timedelta | None = None
    result: object = None
    keep_attempts: bool = False
    text: str | None = field(default=None, init=False, repr=False, compare=False)  # of the result, once decided

    def __post_init__(self) -> None:
        if self.delay is not None:
            check_delay("Reenqueue(delay", self.delay)
        _check("Reenqueue", "keep_attempts", self.keep_attempts, bool, "True or False")


@dataclass(frozen=True, slots=True)
class Fail:
    """This attempt failed, as if the processor had raised ``error``, an exception or a message.

    Retried by the processor's policy, or after ``delay`` when given, while attempts are left; ERROR after that, or at
    once with ``retry=False``. ``TypeError`` or ``ValueError`` for another error, and a delay that is not zero or more.
    """

    error: BaseException | str = ""
    delay: timedelta | None = None
    retry: bool = True

    def __post_init__(self) -> None:
        _check(
            "Fail", "error", self.error, (BaseException, str), "an exception or text, e.g. str(response.status_code)"
        )
        if self.delay is not None:
            check_delay("Fail(delay", self.delay, timedelta.max)  # cut to a year by the policies' own limit
        _check("Fail", "retry", self.retry, bool, "True or False")

    @property
    def facts(self) -> Facts:
        return Facts("fail", "failed", "fail", wakes=True, error=self.error)


@dataclass(frozen=True, slots=True)
class Poison:
    """The task can never succeed: POISON at once, with the reason (text) kept, until an operator decides."""

    facts: ClassVar[Facts] = Facts("poison", "poisoned", "poison")
    reason: str = ""

    def __post_init__(self) -> None:
        _check("Poison", "reason", self.reason, str, "text")


def _check(name: str, argument: str, value: object, kinds: type | tuple[type, ...], wanted: str) -> None:
    if not isinstance(value, kinds):
        raise TypeError(f"{name}({argument}={_shown(value)}) needs {wanted}.")


def _shown(value: object) -> str:
    """Return a plain value as it is written, and of any other its class: its repr may fail."""
    return repr(value)[:80] if type(value) in (bool, bytes, float, int, str, type(None)) else type(value).__name__


def check_delay(place: str, delay: object, longest: timedelta = MAX_DELAY) -> None:
    """Raise ``TypeError`` or ``ValueError``, with the ``place`` of the argument, for what is no delay."""
    if not isinstance(delay, timedelta):
        raise TypeError(f"{place}={_shown(delay)}) needs a timedelta, e.g. timedelta(minutes=5).")
    if not timedelta(0) <= delay <= longest:
        years = " to a hundred years" if longest == MAX_DELAY else ""
        raise ValueError(f"{place}={delay!r}) must be from zero{years}.")


Outcome = Complete | CompleteDelete | Reenqueue | Fail | Poison
OUTCOMES = (Complete, CompleteDelete, Reenqueue, Fail, Poison)
CHECKED = (Fail, Reenqueue, Poison)  # those with a rule of their fields
WITH_RESULT = (Complete, Reenqueue)
PLAIN = frozenset({bool, dict, float, int, list, str})  # types of nearly every result: one look instead of five


def as_outcome(value: object) -> Outcome:
    """Return what a processor's return value means: an outcome itself, anything else is a result."""
    return Complete(value) if type(value) in PLAIN or not isinstance(value, OUTCOMES) else value


# -- what a processor cannot return ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Raised(Fail):
    """The failure of an attempt that raised its error, or had it raised: no processor returned it."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A failure that ``flow.run.decide`` has decided: the next attempt is due after ``delay``; None: ERROR."""

    said: Fail
    delay: timedelta | None = None

    @property
    def facts(self) -> Facts:
        counts_as, call = ("failed", "fail") if self.delay is None else ("retried", "retry")
        return Facts("fail", counts_as, call, wakes=True, error=self.said.error)


@dataclass(frozen=True, slots=True)
class Release:
    """Give back a task that did not start: the attempt is not charged, the place in the ready order is kept."""

    facts: ClassVar[Facts] = Facts("release", "", "release", deletes_or_returns=True)
    columns: ClassVar[Mapping[str, object]] = {}


@dataclass(frozen=True, slots=True)
class Park:
    """Give back, uncharged, a task that cannot be taken here. It is out of the ready order until the reason is gone."""

    facts: ClassVar[Facts] = Facts("park", "", "park", deletes_or_returns=True, parks=True)
    reason: str

    @property
    def columns(self) -> Mapping[str, object]:
        return {"park_reason": self.reason[:200]}


@dataclass(frozen=True, slots=True)
class Suspend:
    """Give back a task that sleeps or waits for a signal: nothing failed, and the attempt is given back.

    It is due after ``delay``; without one it is parked until a signal comes. ``signals``: how many signals the
    processor knew of. If there are more when this is written, the task is due at once.
    """

    facts: ClassVar[Facts] = Facts("suspend", "", "suspend", wakes=True)
    delay: timedelta | None = None
    signals: int | None = None

    @property
    def columns(self) -> Mapping[str, object]:
        """What is written of it. Also a parked task has a delay, because its attempt ran: no lease was lost."""
        if self.delay is None:
            return {"delay": 0.0, "park_reason": SIGNAL, "signals_seen": self.signals}
        return {"delay": self.delay.total_seconds(), "signals_seen": self.signals}


@dataclass(frozen=True, slots=True)
class Lost:
    """Nothing was written: the lease was gone, which ``verb`` found out."""

    facts: ClassVar[Facts] = Facts("lost", "lost", "")
    verb: str


Decidable = Outcome | Suspend  # what a call can end with
# What can be written.
Settlement = Complete | CompleteDelete | Reenqueue | Poison | Failed | Release | Park | Suspend


def checked(outcome: Settlement | Outcome) -> Settlement | Outcome:
    """Return an outcome whose fields are what they must be; raise an error for one that was altered or half made."""
    if type(outcome) is not Complete and isinstance(outcome, CHECKED):
        outcome.__post_init__()
    return outcome


def said(outcome: Outcome | Settlement) -> Outcome | Release | Park | Suspend:
    """Return an outcome as the processor said it, before it was decided."""
    return outcome.said if isinstance(outcome, Failed) else outcome


def with_error(outcome: Settlement, error: BaseException | str) -> Settlement:
    """Return a failure with another error, because a process cannot send its own. Other outcomes stay."""
    return replace(outcome, said=replace(outcome.said, error=error)) if isinstance(outcome, Failed) else outcome


def without_result(outcome: Settlement) -> Settlement:
    """Return an outcome without its result, which may be large."""
    return replace(outcome, result=None) if isinstance(outcome, WITH_RESULT) else outcome
