"""What a job can be told: its arguments, and how text becomes their values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any

from django_dbtaskqueue.core.durations import format_duration, parse_length
from django_dbtaskqueue.core.exceptions import JobOptionError, near_match

EVERY_QUEUE = "*"


@dataclass(frozen=True)
class Argument:
    """One option of a job: ``on_duplicate`` here and in Python is ``--on-duplicate`` on the command line.

    ``type`` makes the value of a text and raises ValueError with a reason; ``bool`` makes a flag. With ``many`` the
    option may be given again, and its value is a tuple.
    """

    name: str
    help: str
    type: Callable[[str], Any] = str
    default: Any = None
    many: bool = False
    required: bool = False
    choices: tuple[str, ...] = ()
    metavar: str | None = None

    @property
    def flag(self) -> str:
        """The option as typed, such as ``--on-duplicate``."""
        return f"--{self.name.replace('_', '-')}"

    def value(self, given: Any) -> Any:
        """Return the value of what Python code gave: text is read as on the command line. Raises JobOptionError."""
        if self.many:
            return tuple(self._one(one) for one in ((given,) if isinstance(given, str) else given or ()))
        return self._one(given)

    def _one(self, given: Any) -> Any:
        try:
            value = self.type(given) if isinstance(given, str) and self.type is not bool else given
        except ValueError as error:
            raise JobOptionError(self.flag, str(error)) from None
        if self.choices and value is not None and value not in self.choices:
            raise JobOptionError(self.flag, f"{value!r} is none of {', '.join(self.choices)}")
        return value


def complete(arguments: Sequence[Argument], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all ``arguments``: those given, and the defaults. Raises JobOptionError."""
    known = {argument.name: argument for argument in arguments}
    for name in given:
        if name not in known:
            raise JobOptionError(name, f"there is no such option.{near_match(name, known)}")
    values = {name: argument.value(given.get(name, argument.default)) for name, argument in known.items()}
    for name, argument in known.items():
        if argument.required and not values[name]:
            raise JobOptionError(argument.flag, f"it is needed: {argument.help}")
    return values


def moment(text: str) -> datetime:
    """Return the time of ISO 8601 text, in UTC unless it says otherwise."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is no time. Write it as 2026-01-31 or 2026-01-31T08:00+01:00") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def day(text: str) -> date:
    """Return the day of ISO 8601 text."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is no day. Write it as 2026-01-31") from None


def count(text: str) -> int:
    """Return a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def share(text: str) -> float:
    """Return the number between 0 and 1 of text such as "99.9%" or "0.999"."""
    try:
        number = Decimal(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except InvalidOperation:
        number = Decimal(-1)
    if not 0 <= number <= 1:
        raise ValueError(f'{text!r} is no share. Write a percentage, as in "99.9%", or a number between 0 and 1')
    return float(number)


def pair(text: str) -> tuple[str, str]:
    """Return (NAME, VALUE) of text such as "reference=flight_id"."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ValueError(f"{text!r} is no NAME=VALUE")
    return name, value


@dataclass(frozen=True)
class Objective:
    """At least ``share`` (0 to 1) of the ended tasks of ``queue`` complete, ``within`` a time of their creation."""

    queue: str
    share: float
    within: timedelta | None = None

    def __str__(self) -> str:
        text = f"{self.share * 100:g}%"
        return text if self.within is None else f"{text} within {format_duration(self.within)}"


DEFAULT_OBJECTIVE = Objective(EVERY_QUEUE, 0.99)


def objective(text: str) -> Objective:
    """Return the objective of "claims=99.9%/5m", or of "*=99%" for every queue. Raises ValueError with a reason."""
    try:
        queue, rest = pair(text)
    except ValueError:
        raise ValueError(f'{text!r} is no objective. Write it as "claims=99.9%/5m" or "*=99%"') from None
    wanted, _, within = rest.partition("/")
    return Objective(queue, share(wanted), parse_length(within) if within else None)


def by_queue(objectives: Iterable[Objective]) -> dict[str, Objective]:
    """Return the objectives by queue, with one for ``*`` always among them. A later one wins."""
    return {EVERY_QUEUE: DEFAULT_OBJECTIVE, **{one.queue: one for one in objectives}}
