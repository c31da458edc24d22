"""Durations as text, with one grammar and two spellings; pauses between attempts, and the clock by which they pass."""

import random
import re
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import asyncio

K = TypeVar("K", bound=Hashable)
ZERO = timedelta(0)
MICROSECOND = timedelta(microseconds=1)
UNITS = {"d": 86_400_000_000, "h": 3_600_000_000, "m": 60_000_000, "s": 1_000_000, "ms": 1_000, "us": 1, "µs": 1}
FORMS = 'Write numbers with a unit of d, h, m, s, ms or us, such as "15m" or "1m30s", or ISO 8601, such as "PT1M30S"'
WITHOUT_UNIT = '. Text without a unit is read as "HH:MM:SS" or as seconds'
MAX_TEXT_LENGTH = 100
# Times that a row may hold. A table of an older system has old ones; Python cannot read one after the year 9999.
READABLE_TIMES = (datetime(1900, 1, 1, tzinfo=UTC), datetime(9900, 1, 1, tzinfo=UTC))
MAX_DELAY = timedelta(days=36_525)  # a later time may be after year 9999, which Python cannot read back
MIN_LEASE = timedelta(milliseconds=100)  # a shorter one would run out before the task starts
ROUGH_DIGITS = 3

_NUMBER = r"[0-9]*\.?[0-9]+"
_PARTS = re.compile(rf"({_NUMBER})\s*(days?|d|h|ms|us|µs|m|s)\s*")
_WITH_UNITS = re.compile(rf"(?P<sign>[-+]?)(?P<parts>(?:{_PARTS.pattern})+)")
_N = r"[0-9]+(?:[.,][0-9]+)?"
_ISO = re.compile(rf"(?P<sign>[-+]?)p(?:(?P<d>{_N})d)?(?:t(?:(?P<h>{_N})h)?(?:(?P<m>{_N})m)?(?:(?P<s>{_N})s)?)?")
_CLOCK = re.compile(
    r"(?:(?P<sign>[-+])|(?P<d>[0-9]+) (?:days?,? )?)?"
    rf"(?:(?:(?P<h>[0-9]+):)?(?P<m>[0-9]+):)?(?P<s>{_N})"
)


def parse_duration(value: object, *, needs_unit: bool = False) -> timedelta:
    """Return the duration that text gives, or a ``timedelta`` as it is; ``ValueError`` shows the accepted forms.

    Text is read in any case: ``15m``, ``1m30s``, ``10 s``, ``1.5h``; ISO 8601 as in ``PT1M30S`` or ``P1DT2H``;
    ``HH:MM:SS``, ``MM:SS`` and ``1 day, 02:00:00``; a number alone is seconds. A leading ``-`` makes it negative.
    ``needs_unit`` refuses forms without a unit, where such text can also be a date or a time of day.
    """
    if isinstance(value, timedelta):
        return value
    if isinstance(value, str) and len(value) <= MAX_TEXT_LENGTH:
        found = _read(value.strip().lower(), needs_unit=needs_unit)
        if found is not None:
            try:
                return found * MICROSECOND
            except OverflowError:
                raise ValueError(f"{value!r} is longer than the longest duration, {timedelta.max.days} days") from None
    raise ValueError(f"{repr(value)[:MAX_TEXT_LENGTH]} is not a duration. {FORMS}{'' if needs_unit else WITHOUT_UNIT}")


def parse_length(value: object, *, needs_unit: bool = False) -> timedelta:
    """Return a duration that a person gave: ``ValueError`` also for a negative one, and for one of over 100 years."""
    found = parse_duration(value, needs_unit=needs_unit)
    if found < ZERO:
        raise ValueError(f'{value!r} is negative. Write a duration of 0 or more, such as "15m"')
    if found > MAX_DELAY:
        raise ValueError(f"{value!r} is too long. Write a duration of at most a hundred years, 36525d")
    return found


def _read(text: str, *, needs_unit: bool) -> int | None:
    """Return the microseconds that ``text`` gives."""
    if found := _WITH_UNITS.fullmatch(text):
        parts = [(number, unit if unit in UNITS else "d") for number, unit in _PARTS.findall(found["parts"])]
    elif found := _ISO.fullmatch(text) or (None if needs_unit else _CLOCK.fullmatch(text)):
        numbers = found.groupdict()
        parts = [(number.replace(",", "."), unit) for unit, number in numbers.items() if number and unit in UNITS]
    if found is None or not parts:
        return None
    total = round(sum((Decimal(number) * UNITS[unit] for number, unit in parts), Decimal(0)))
    return -total if found["sign"] == "-" else total


def format_duration(value: timedelta, *, rough: bool = False) -> str:
    """Return a duration for people, exact, as in ``1h30m``, ``12.5ms`` or ``0s``; ``parse_duration`` reads it.

    ``rough`` keeps two units, as in ``4m12s`` and ``3d4h``, below a minute three digits (``3.46s``), and rounds down.
    """
    rest = abs(value) // MICROSECOND
    if rough:
        rest -= rest % _precision(rest)
    parts = []
    for unit in ("d", "h", "m"):
        number, rest = divmod(rest, UNITS[unit])
        parts += [f"{number}{unit}"] if number else []
    if rest:
        unit = next(unit for unit in ("s", "ms", "µs") if rest >= UNITS[unit])
        parts.append(f"{_decimal(rest, UNITS[unit])}{unit}")
    return f"{'-' * (value < ZERO)}{''.join(parts)}" if parts else "0s"


def format_age(age: timedelta | None) -> str:
    """Return how long something has lasted as a rough duration for people; a dash if that is not known."""
    return UNKNOWN if age is None else format_duration(max(age, ZERO), rough=True)


def format_seconds(seconds: float) -> str:
    """Return a number of seconds as a rough duration for people."""
    return format_duration(timedelta(seconds=seconds), rough=True)


def iso_duration(value: timedelta) -> str:
    """Return a duration for machines, exact, in ISO 8601, as in ``PT1H30M``, ``P2D`` or ``PT0S``."""
    rest, time = abs(value) // MICROSECOND, ""
    days, rest = divmod(rest, UNITS["d"])
    for unit in ("h", "m"):
        number, rest = divmod(rest, UNITS[unit])
        time += f"{number}{unit.upper()}" if number else ""
    if rest or not (days or time):
        time += f"{_decimal(rest, UNITS['s'])}S"
    return f"{'-' * (value < ZERO)}P{f'{days}D' if days else ''}{f'T{time}' if time else ''}"


def _precision(rest: int) -> int:
    """Return the microseconds that a rough duration is a multiple of."""
    for unit, smaller in (("d", "h"), ("h", "m"), ("m", "s")):
        if rest >= UNITS[unit]:
            return UNITS[smaller]
    return int(10 ** max(len(str(rest)) - ROUGH_DIGITS, 0))


def _decimal(number: int, size: int) -> str:
    """Return ``number / size`` with every digit; ``size`` is a power of ten."""
    return format(Decimal(number) / size, "f")


@dataclass(frozen=True, slots=True)
class Rate:
    """A number of tasks in a time, such as ``100/s``."""

    tasks: int
    time: timedelta

    @property
    def per_second(self) -> float:
        return self.tasks / self.time.total_seconds()

    def __str__(self) -> str:
        text = format_duration(self.time)
        return f"{self.tasks}/{text[1:] if text in ('1s', '1m', '1h', '1d') else text}"


def parse_rate(value: object) -> Rate:
    """Return the rate that text gives, or a ``Rate`` as it is; ``ValueError`` shows the form."""
    if isinstance(value, Rate):
        return value
    tasks, slash, time = str(value).partition("/")
    with suppress(ValueError):
        span = parse_length(f"1{time.strip()}" if time.strip()[:1].isalpha() else time, needs_unit=True)
        if slash and int(tasks) >= 1 and span > ZERO:
            return Rate(int(tasks), span)
    raise ValueError(f"{value!r} is not a rate. Write a number of tasks and a time, such as 100/s, 5/m or 1/10s")


def next_pause(pause: float, first: float, longest: float) -> float:
    """Return the seconds to wait after one more failure: twice the last ``pause`` (0: none yet), within the limits."""
    return min(longest, 2 * pause or first)


def jittered(seconds: float) -> float:
    """Return between half and one and a half times ``seconds``, so that processes do not retry all at once."""
    return seconds * random.uniform(0.5, 1.5)


class Pauses(Generic[K]):
    """Rows of a table that raised: each rests for a growing time, and its neighbours go on. One for each such loop.

    ``beyond``: errors that are of no row, such as a database that is away; they are raised.
    """

    def __init__(self, first: float, longest: float, beyond: type[Exception] | tuple[()] = ()) -> None:
        self._bounds, self._beyond = (first, longest), beyond
        self._rests: dict[K, tuple[float, float]] = {}  # until when, and how long this time

    def resting(self) -> list[K]:
        now = clock.monotonic()
        return [key for key, (until, _pause) in self._rests.items() if until > now]

    def rest(self, key: K) -> None:
        pause = next_pause(self._rests.get(key, (0.0, 0.0))[1], *self._bounds)
        self._rests[key] = clock.monotonic() + pause, pause

    @contextmanager
    def around(self, key: K, note: Callable[[Exception], object]) -> Iterator[None]:
        """Try a row for a ``with`` block. An exception is given to ``note``, which names the row to an operator."""
        try:
            yield
            self._rests.pop(key, None)
        except self._beyond:
            raise
        except Exception as error:
            self.rest(key)
            note(error)

    def apart(
        self, keys: Sequence[K], act: Callable[[Sequence[K]], object], note: Callable[[K, Exception], object]
    ) -> None:
        """Act on rows together. Where that raises, act on either half: only the rows that raise alone rest."""
        if len(keys) == 1:
            with self.around(keys[0], lambda error: note(keys[0], error)):
                act(keys)
        elif keys:
            try:
                act(keys)
            except self._beyond:
                raise
            except Exception:
                middle = len(keys) // 2
                self.apart(keys[:middle], act, note)
                self.apart(keys[middle:], act, note)


class Clock:
    """Monotonic seconds, and waits that end at an event or after a time. What waits or decides by time asks ``clock``.

    Production calls the standard library without a detour; a test sets the attributes.
    """

    def __init__(self) -> None:
        self.monotonic = time.monotonic
        self.wait = threading.Event.wait
        self.wait_for = threading.Condition.wait_for

    async def wait_async(self, event: "asyncio.Event", seconds: float | None) -> None:
        import asyncio  # here: a process of Spark reads durations, and waits for nothing

        with suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), seconds)


clock = Clock()
UNKNOWN = "-"  # as people read a value that is not known
id_readers: list[Callable[[str], tuple[str, str, int] | None]] = []  # of ids that programs have; the backend adds one


def task_place(text: str) -> tuple[str, str, int] | None:
    """Return the database, the model and the number of the task that this is an id of, if it was given out; or None."""
    return next(filter(None, (read(text) for read in id_readers)), None)


def thousands(value: float | None) -> str:
    """Return a number with its thousands apart; a fraction below 1,000 has three digits."""
    if value is None:
        return UNKNOWN
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:,.0f}"


def percent(share: float | None) -> str:
    """Return a share (0 to 1) as a percentage; a share just below 1 does not become 100 %."""
    if share is None:
        return UNKNOWN
    text = f"{share * 100:.2f}".rstrip("0").rstrip(".")
    return "> 99.99 %" if text == "100" and share < 1 else f"{text} %"


def seconds(value: float | None) -> str:
    """Return a number of seconds as a rough duration."""
    return UNKNOWN if value is None else format_seconds(value)
