"""When a failed task is tried again. Deciding is pure: nothing here reads a clock or a database.

A policy is any callable ``(attempt, error) -> timedelta | None``: ``attempt`` is 1 at the first failure, None means
"give up". The policies below never raise and never exceed 365 days, at any attempt. ``jitter=0.3`` spreads each
delay evenly over 70 % to 130 % of it, after any maximum was applied; ``jitter=0`` keeps the schedule exact.
"""

import math
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Protocol

from django_dbtaskqueue.core import logger
from django_dbtaskqueue.core.durations import format_duration, parse_length
from django_dbtaskqueue.core.exceptions import dotted, near_match
from django_dbtaskqueue.core.outcomes import Fail

Policy = Callable[[int, BaseException | None], timedelta | None]


class PolicyByError(Protocol):
    """A mapping of exception classes to policies. ``Mapping`` would refuse ``dict[type[ValueError], Fixed]``."""

    def items(self) -> Iterable[tuple[type[BaseException], Policy | str | None]]:
        """Return each class and its policy."""


AnyPolicy = Policy | PolicyByError | str | None
ZERO, LONGEST = timedelta(0), timedelta(days=365)
JITTER = 0.3
LAST_ATTEMPT = 2**31 - 1  # what the attempt columns hold


@dataclass(frozen=True)
class _Schedule(ABC):
    jitter: float = field(default=JITTER, kw_only=True)

    def __post_init__(self) -> None:
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"{type(self).__name__}: jitter must be between 0 (exact) and 1, not {self.jitter!r}.")
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name in {"interval", "initial", "step", "maximum"} and (value, entry.default) != (None, None):
                self._check(entry.name, value)

    def _check(self, name: str, delay: object) -> None:
        where = f"{type(self).__name__}: {name}"
        if not isinstance(delay, timedelta):
            raise TypeError(f"{where} must be a timedelta, not {delay!r}. Write timedelta(seconds=10).")
        if not ZERO <= delay <= LONGEST:
            raise ValueError(f"{where} must be between 0 and 365 days, not {delay}.")

    def __call__(self, attempt: int, error: BaseException | None = None) -> timedelta | None:
        exact = self.delay(attempt)
        if not exact or not self.jitter:
            return exact
        return min(exact * random.uniform(1 - self.jitter, 1 + self.jitter), LONGEST)

    def delay(self, attempt: int) -> timedelta | None:
        """Return the delay after failure number ``attempt`` without jitter; None to give up."""
        try:
            exact = self._delay(min(max(attempt, 1), LAST_ATTEMPT))
        except OverflowError:
            return LONGEST
        return exact if exact is None else min(exact, LONGEST)

    @abstractmethod
    def _delay(self, attempt: int) -> timedelta | None: ...


@dataclass(frozen=True)
class Fixed(_Schedule):
    """The same delay each time: I, I, I, …"""

    interval: timedelta

    def _delay(self, attempt: int) -> timedelta:
        return self.interval


Linear = Fixed


@dataclass(frozen=True)
class Arithmetic(_Schedule):
    """``initial``, then ``step`` more each time. Without a step it is twice the initial delay: I, 3I, 5I, …"""

    initial: timedelta
    step: timedelta | None = None

    def _delay(self, attempt: int) -> timedelta:
        return self.initial + (attempt - 1) * (2 * self.initial if self.step is None else self.step)


@dataclass(frozen=True)
class Geometric(_Schedule):
    """``initial``, then ``ratio`` times as long each time, up to ``maximum``: I, 2I, 4I, …"""

    initial: timedelta
    ratio: float = 2
    maximum: timedelta | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.ratio < math.inf:
            raise ValueError(f"Geometric: ratio must be a number above 0, not {self.ratio!r}. 2 doubles the delay.")

    def _delay(self, attempt: int) -> timedelta:
        top = LONGEST if self.maximum is None else self.maximum
        try:
            return min(self.initial * float(self.ratio) ** (attempt - 1), top)
        except OverflowError:
            return top if self.initial else ZERO


@dataclass(frozen=True, init=False)
class Sequence(_Schedule):
    """A plan, whose last delay is used for all later attempts: ``Sequence(timedelta(0), timedelta(minutes=1))``."""

    delays: tuple[timedelta, ...]

    def __init__(self, *delays: timedelta, jitter: float = JITTER) -> None:
        _fill(self, delays=delays, jitter=jitter)
        if not delays:
            raise ValueError("Sequence: give at least one delay, e.g. Sequence(timedelta(seconds=10)).")
        for number, delay in enumerate(delays, 1):
            self._check(f"delay {number}", delay)

    def _delay(self, attempt: int) -> timedelta:
        return self.delays[min(attempt, len(self.delays)) - 1]


@dataclass(frozen=True, init=False)
class Staged(_Schedule):
    """Delays by ranges of attempts: ``Staged((3, timedelta(seconds=10)), (None, timedelta(minutes=5)))``.

    Each stage is (last attempt, delay); None is "all later ones", and after a numbered last stage the policy gives up.
    """

    stages: tuple[tuple[int | None, timedelta], ...]

    def __init__(self, *stages: tuple[int | None, timedelta], jitter: float = JITTER) -> None:
        _fill(self, stages=stages, jitter=jitter)
        if not stages:
            raise ValueError("Staged: give at least one stage, e.g. Staged((None, timedelta(seconds=10))).")
        before = 0
        for number, (last, delay) in enumerate(stages, 1):
            self._check(f"delay of stage {number}", delay)
            if last is None and number == len(stages):
                return
            if not isinstance(last, int) or last <= before:
                raise ValueError(
                    f"Staged: stage {number} must end after attempt {before}, not {last!r}; None ends all."
                )
            before = last

    def _delay(self, attempt: int) -> timedelta | None:
        return next((delay for last, delay in self.stages if last is None or attempt <= last), None)


def _fill(policy: _Schedule, **values: object) -> None:
    for name, value in values.items():
        object.__setattr__(policy, name, value)  # frozen, and a dataclass cannot have an __init__ with *args
    policy.__post_init__()


DEFAULT = Geometric(timedelta(seconds=10), maximum=timedelta(hours=1))


@dataclass(frozen=True)
class PerException:
    """A policy per exception class: the most specific wins, None is "never"; without any match ``retry.DEFAULT``."""

    policies: Mapping[type[BaseException], Policy | None] = field(hash=False)

    def __call__(self, attempt: int, error: BaseException | None = None) -> timedelta | None:
        known = (cls for cls in type(error).__mro__ if cls in self.policies)
        policy = self.policies.get(next(known, Exception), DEFAULT)
        return None if policy is None else policy(attempt, error)


def normalise(policy: AnyPolicy) -> Policy:
    """Return a policy from a policy, a mapping per exception class, text for ``parse_policy``, or None (the default).

    Raises TypeError or ValueError for anything else, before a task depends on it.
    """
    if policy is None or isinstance(policy, str):
        return DEFAULT if policy is None else parse_policy(policy)
    if isinstance(policy, Mapping):
        if wrong := [cls for cls in policy if not (isinstance(cls, type) and issubclass(cls, BaseException))]:
            raise TypeError(f"A mapping of retry policies has exception classes as keys, not {wrong[0]!r}.")
        return PerException({cls: None if entry is None else normalise(entry) for cls, entry in policy.items()})
    if callable(policy) and not isinstance(policy, type):
        return policy
    raise TypeError(
        f"{policy!r} is not a retry policy. Give Fixed(timedelta(seconds=10)) or (attempt, error) -> delay."
    )


def retry_delay(fail: Fail, *, attempt: int, max_attempts: int, policy: AnyPolicy = None) -> timedelta | None:
    """Return the delay before the next attempt, or None when the task must end in ERROR. Never raises.

    The budget comes first, then ``Fail.retry``, then ``Fail.delay`` (exact, without jitter), then the policy.
    """
    if attempt >= max_attempts or not fail.retry:
        return None
    if fail.delay is not None:
        return min(fail.delay, LONGEST)
    return next_delay(policy, attempt, fail.error if isinstance(fail.error, BaseException) else None)


def next_delay(policy: AnyPolicy, attempt: int, error: BaseException | None = None) -> timedelta | None:
    """Return the delay that ``policy`` gives. Never raises: a policy's error is logged, and DEFAULT decides."""
    try:
        delay = normalise(policy)(attempt, error)
        if delay is None or (isinstance(delay, timedelta) and delay >= ZERO):
            return delay and min(delay, LONGEST)
        raise TypeError(f"it returned {delay!r}, neither None nor a timedelta of 0 or more")
    except Exception:
        logger.exception("Retry policy %r failed at attempt %r; the default policy decides.", policy, attempt)
        return DEFAULT(attempt)


_POLICY_BY_NAME: dict[str, Callable[..., Policy]] = {
    "linear": Fixed,
    **{cls.__name__.lower(): cls for cls in (Fixed, Arithmetic, Geometric, Sequence, Staged)},
}
_POLICY_FORMS = (
    "The forms are: fixed:10s | arithmetic:10s,step=5s | geometric:10s,x2,max=1h | sequence:0s,10s,1m30s | "
    "staged:3=10s,5=1m,rest=5m, each with ,jitter=0 if wanted; a duration is also read in ISO 8601, such as PT1M30S."
)


def parse_policy(text: str) -> Policy:
    """Return the policy that ``text`` describes, e.g. ``"geometric:10s,x2,max=1h"``; ValueError shows the forms."""
    kind, _, rest = "".join(text.lower().split()).partition(":")
    if kind not in _POLICY_BY_NAME:
        raise ValueError(f"{text!r} is not a retry policy.{near_match(kind, _POLICY_BY_NAME)} {_POLICY_FORMS}")
    try:
        return _build(kind, [re.sub("^x", "ratio=", word).partition("=") for word in rest.split(",")])
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{text!r} is not a retry policy: {str(error).rstrip('.')}. {_POLICY_FORMS}") from error


def _build(kind: str, words: list[tuple[str, str, str]]) -> Policy:
    options = {name: float(value) for name, _, value in words if name in {"jitter", "ratio"}}
    words = [word for word in words if word[0] not in options]
    if kind == "staged":
        return Staged(
            *((None if last == "rest" else int(last), parse_length(text)) for last, _, text in words), **options
        )
    delays = {"maximum" if name == "max" else name: parse_length(text) for name, equals, text in words if equals}
    return _POLICY_BY_NAME[kind](*(parse_length(text) for text, equals, _ in words if not equals), **options, **delays)


def policy_text(policy: Policy) -> str:
    """Return the text that ``parse_policy`` reads as ``policy``; of one that only code can express, a description."""
    if isinstance(policy, PerException):
        entries = policy.policies.items()
        return "; ".join(f"{cls.__qualname__} -> {policy_text(entry) if entry else 'never'}" for cls, entry in entries)
    if not isinstance(policy, _Schedule):
        return dotted(policy)
    jitter = "" if policy.jitter == JITTER else f",jitter={policy.jitter!r}"
    return f"{type(policy).__name__.lower()}:{','.join(_words(policy))}{jitter}"


def _words(policy: _Schedule) -> list[str]:
    if isinstance(policy, Sequence):
        return [format_duration(delay) for delay in policy.delays]
    if isinstance(policy, Staged):
        return [f"{'rest' if last is None else last}={format_duration(delay)}" for last, delay in policy.stages]
    beginnings = {"interval": "", "initial": "", "step": "step=", "ratio": "x", "maximum": "max="}
    given = {name: value for name in beginnings if (value := getattr(policy, name, None)) is not None}
    return [
        beginnings[name] + (format_duration(value) if name != "ratio" else repr(value).removesuffix(".0"))
        for name, value in given.items()
    ]
