"""Rules of uniqueness: which calls of ``enqueue`` mean the same task, and what a further call does.

A rule derives a reference from the payload. The unique constraint of references enforces it, so there is no other
mechanism, and two producers at the same moment cannot both insert.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from datetime import timedelta
from hashlib import blake2b
from typing import ClassVar

from django_dbtaskqueue.core.durations import MAX_DELAY, format_duration, parse_length
from django_dbtaskqueue.core.exceptions import EnqueueError, near_match
from django_dbtaskqueue.core.states import CREATED, PROCESSING, Status

HASH_LENGTH = 40  # hexadecimal digits: 160 bits
MAX_WAIT_FACTOR = 10  # of a Debounce without ``max_wait``: so many times ``wait``
DURATION_FIELDS = ("period", "wait", "max_wait")
RULE_FORMS = (
    "The forms are: unique | unique:period=1h,until=started,on_duplicate=error | throttle:1h | "
    "debounce:30s,max_wait=5m, each with ,fields=user+kind if only these fields of the payload count."
)


class UniqueRule(ABC):
    """What the rules have in common. ``fields``: the payload's fields that must be equal; (): the whole payload."""

    kind: ClassVar[str]
    fields: tuple[str, ...] = ()
    keeping: tuple[Status, ...] = ()  # a task in one of these statuses keeps its reference
    period: timedelta | None = None  # and each task for so long after it was enqueued
    wait: timedelta | None = None  # how long after the last call a task is due
    bound: timedelta | None = None  # and how long after the first call at the latest
    on_duplicate: str = "ignore"

    def __post_init__(self) -> None:
        names: object = self.fields  # whatever a caller gave
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
            raise ValueError(f"fields={self.fields!r} must be names of the payload's fields, e.g. fields=('user',).")
        object.__setattr__(self, "fields", tuple(sorted(set(self.fields))))
        for name in DURATION_FIELDS:
            span = getattr(self, name, None)
            if span is not None and not (isinstance(span, timedelta) and timedelta(0) < span <= MAX_DELAY):
                raise ValueError(f"{name}={span!r} must be a timedelta over zero and up to a hundred years.")

    @property
    @abstractmethod
    def words(self) -> str:
        """What the rule allows, as part of a sentence."""

    def reference(self, payload_type: str | None, payload: str | None, key: bytes) -> str:
        """Return the reference that all equal calls share; ``payload`` is JSON text.

        The order of keys does not count, and 1.0 is 1, because PostgreSQL and JavaScript do not keep these apart.
        Without ``key`` nobody can find out by the reference whether a guess of the payload is right.
        """
        value = None if payload is None else json.loads(payload, parse_float=_number)
        if self.fields:
            found = value if isinstance(value, Mapping) else {}
            for name in self.fields:
                if name not in found:
                    raise EnqueueError(
                        f"unique={self}: the payload has no field {name!r}.{near_match(name, found)} Name fields that "
                        "each payload of the queue has, or leave fields out to compare whole payloads."
                    )
            value = [found[name] for name in self.fields]
        text = json.dumps([payload_type, self.fields, value], sort_keys=True, separators=(",", ":"))
        return f"{self.kind}:{blake2b(text.encode(), key=key, digest_size=HASH_LENGTH // 2).hexdigest()}"

    def __str__(self) -> str:
        """The text that ``parse_rule`` reads."""
        given = [(one.name, one.default, getattr(self, one.name)) for one in fields(self)]  # type: ignore[arg-type]
        words = [
            text if default is MISSING else f"{name}={text}"
            for name, default, value in given
            if value != default
            for text in [_text(value)]
        ]
        return f"{self.kind}:{','.join(words)}" if words else self.kind


@dataclass(frozen=True)
class Unique(UniqueRule):
    """One task of equal payloads until it is finished (or ``until="started"``), and within ``period`` if given.

    A further call returns the task that there is, or raises ``DuplicateTask`` with ``on_duplicate="error"``.
    """

    kind: ClassVar[str] = "unique"
    fields: tuple[str, ...] = ()
    period: timedelta | None = None
    until: str = "finished"
    on_duplicate: str = "ignore"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in (("until", ("finished", "started")), ("on_duplicate", ("ignore", "error"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(map(repr, choices))}.")

    @property
    def keeping(self) -> tuple[Status, ...]:  # type: ignore[override]
        return (CREATED, PROCESSING) if self.until == "finished" else (CREATED,)

    @property
    def words(self) -> str:
        more = f", and one in {format_duration(self.period)}" if self.period else ""
        return f"one task of equal payloads until it is {self.until}{more}"


@dataclass(frozen=True)
class Throttle(UniqueRule):
    """One task of equal payloads in ``period``: the first wins, and a further call returns it, whatever its status."""

    kind: ClassVar[str] = "throttle"
    period: timedelta = field()  # without the default that it inherits
    fields: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return f"one task of equal payloads in {format_duration(self.period)}"


@dataclass(frozen=True)
class Debounce(UniqueRule):
    """One task for calls that follow each other within ``wait``: the last wins, and the task is due ``wait`` after it.

    It is due at most ``max_wait`` after the first call; None: ten times ``wait``. From its start a call makes another.
    """

    kind: ClassVar[str] = "debounce"
    keeping: ClassVar[tuple[Status, ...]] = (CREATED,)  # type: ignore[misc]
    on_duplicate: ClassVar[str] = "replace"  # type: ignore[misc]
    wait: timedelta = field()  # as above
    max_wait: timedelta | None = None
    fields: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_wait is not None and self.max_wait < self.wait:
            raise ValueError(f"max_wait={self.max_wait!r} must be at least wait={self.wait!r}.")

    @property
    def bound(self) -> timedelta:  # type: ignore[override]
        return self.max_wait or min(MAX_WAIT_FACTOR * self.wait, MAX_DELAY)

    @property
    def words(self) -> str:
        last, first = format_duration(self.wait), format_duration(self.bound)
        return f"one task of equal payloads, due {last} after the last call and at most {first} after the first"


RULES: dict[str, type[UniqueRule]] = {"unique": Unique, "throttle": Throttle, "debounce": Debounce}


def parse_rule(text: str) -> UniqueRule:
    """Return the rule that ``text`` describes, e.g. ``"debounce:30s,max_wait=5m"``; ValueError shows the forms."""
    kind, _, rest = text.strip().partition(":")
    if kind not in RULES:
        raise ValueError(f"{text!r} is not a rule of uniqueness.{near_match(kind, RULES)} {RULE_FORMS}")
    words = [tuple(map(str.strip, word.partition("="))) for word in rest.split(",") if word.strip()]
    try:
        plain = [parse_length(word) for word, equals, _ in words if not equals]
        return RULES[kind](*plain, **{name: _value(name, value) for name, equals, value in words if equals})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{text!r} is not a rule of uniqueness: {str(error).rstrip('.')}. {RULE_FORMS}") from error


def kind_of(reference: str | None) -> str:
    """Return the kind of the rule that derived a reference, freed (with a third part) or not; "" for a caller's own."""
    kind, _, rest = (reference or "").partition(":")
    return kind if kind in RULES and len(rest.partition(":")[0]) == HASH_LENGTH else ""


def _value(name: str, text: str) -> object:
    if name in DURATION_FIELDS:
        return parse_length(text)
    return tuple(text.split("+")) if name == "fields" else text


def _text(value: timedelta | str | tuple[str, ...]) -> str:
    if isinstance(value, timedelta):
        return format_duration(value)
    return value if isinstance(value, str) else "+".join(value)


def _number(text: str) -> float | int:
    number = float(text)
    return int(number) if number.is_integer() else number
