"""Search values: how each type of value is read from a search and written to it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from difflib import get_close_matches
from typing import TYPE_CHECKING

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_dbtaskqueue.core.durations import parse_duration
from django_dbtaskqueue.core.exceptions import SearchError
from django_dbtaskqueue.core.numbers import task_number
from django_dbtaskqueue.core.states import Status

if TYPE_CHECKING:
    from django.utils.functional import _StrPromise

MAX_BIGINT = 2**63 - 1
WHOLE_NUMBER = re.compile(r"-?\d{1,19}")
JSON_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]{1,4})?")
NEARLY_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
MAX_SPAN = timedelta(days=36_500)
SEARCHED_YEARS = range(1970, 2201)  # with a day more, or in another time zone, Python can still read these
COMPARISONS = (">=", "<=", ">", "<")
TEXT_OPS = "=^$~"
STATE_NAMES = ("due", "held", "parked", "scheduled", "stale")

Quote = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Match:
    """One alternative of a term."""

    # "=", "^" (begins with), "$" (ends with), "~" (contains), ">", ">=", "<", "<=",
    # or ".." (from ``value`` to ``high``, both included)
    op: str
    value: str
    high: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """A value as it was written: ``bare`` up to the first quote, ``rest`` from there on with the quotes taken off."""

    bare: str
    rest: str = ""
    star: bool = False  # a bare star ended it; it stands in neither of the two
    star_first: bool = False  # a bare star began it
    quoted: bool = False

    @property
    def text(self) -> str:
        """Without the stars."""
        return self.bare + self.rest

    @property
    def whole(self) -> str:
        """With the stars, for value types without a star."""
        return "*" * self.star_first + self.text + "*" * self.star


def _written(match: Match, quote: Quote) -> str:
    if match.op == "..":
        return f"{match.value}..{match.high}"
    return f"{'' if match.op == '=' else match.op}{match.value}"


@dataclass(frozen=True, slots=True)
class ValueType:
    """How a value is read and written, so that reading what was written gives the same.

    ``read`` gets the term as it was written, too: a ``SearchError`` names it.
    """

    read: Callable[[Piece, str], Match]
    write: Callable[[Match, Quote], str] = _written


def _text(piece: Piece, _term: str) -> Match:
    """Every character but a star at the begin or the end is literal: ``UA*``, ``*15``, ``*A-1*``."""
    return Match(TEXT_OPS[piece.star + 2 * piece.star_first], piece.text)


def _text_written(match: Match, quote: Quote) -> str:
    return "*" * (match.op in "$~") + quote(match.value) + "*" * (match.op in "^~")


def _fragment(op: str, when_empty: str | _StrPromise) -> ValueType:
    """The beginning of a text (``^``), or any part of it, in any case (``=``). A star at the end changes nothing."""

    def read(piece: Piece, term: str) -> Match:
        if not piece.text:
            raise SearchError(term, str(when_empty))
        if piece.star_first and op == "^":
            words = _("a plain word is how a reference begins. Write ref:%(value)s for one that contains it.")
            raise SearchError(term, words % {"value": f"*{piece.text}*"})
        return Match(op, piece.text)

    return ValueType(read, lambda match, quote: quote(match.value))


def _choice(*known: str) -> ValueType:
    """One of a few words, in any case."""

    def read(piece: Piece, term: str) -> Match:
        text = piece.whole
        for word in known:
            if word.lower() == text.lower():
                return Match("=", word)
        near = meant(text.upper(), known) or meant(text.lower(), known)
        words = _("%(value)s is not one of %(words)s.")
        raise SearchError(term, words % {"value": repr(text), "words": ", ".join(known)} + near)

    return ValueType(read)


def _ordered(value: Callable[[str, str], str], equal: Callable[[str, str], None] | None = None) -> ValueType:
    """A value that can be compared: ``3``, ``>=3``, ``1..5``.

    ``value`` returns the one form of a text; ``equal`` refuses what nothing can be equal to.
    """

    def read(piece: Piece, term: str) -> Match:
        op, text = split(piece)
        low, dots, high = text.partition("..")
        if dots and not op:
            return Match("..", value(low, term), value(high, term))
        match = Match(op or "=", value(text, term))
        if equal is not None and match.op == "=":
            equal(match.value, term)
        return match

    return ValueType(read)


def _number(text: str, term: str) -> str:
    text = task_number(text)
    if not WHOLE_NUMBER.fullmatch(text) or abs(int(text)) > MAX_BIGINT:
        raise SearchError(term, _("%(value)s is not a whole number. Write 3, >=3, or 1..5.") % {"value": repr(text)})
    return str(int(text))


def _span(text: str, term: str) -> str:
    """Return a length of time as people write it."""
    if span_of(text) is None:
        words = _("%(value)s is not a length of time. Write >10m, <2h, or 1d..7d.")
        raise SearchError(term, words % {"value": repr(text)})
    return text


def _refuse_exact_age(text: str, term: str) -> None:
    """Nothing is exactly ten minutes old."""
    words = _("say older, %(name)s:>%(value)s, or younger, %(name)s:<%(value)s.")
    raise SearchError(term, words % {"name": term.lstrip("-").partition(":")[0], "value": text})


def _time(text: str, term: str) -> str:
    """Return a time in ISO 8601; a length of time, which says how long ago, as it is written."""
    if span_of(text) is not None:
        return text
    is_day = re.fullmatch(r"\d{4}-\d\d-\d\d", text)
    try:
        found = date.fromisoformat(text) if is_day else datetime.fromisoformat(text)
    except ValueError:
        words = _("%(value)s is not a time. Write <1h (less than an hour ago), 2026-11-20, or >=2026-11-20T08:00.")
        raise SearchError(term, words % {"value": repr(text)}) from None
    if found.year not in SEARCHED_YEARS:
        words = _("%(value)s is too early or too late. Write a time from the year 1970 to 2200.")
        raise SearchError(term, words % {"value": repr(text)})
    return found.isoformat()


def _refuse_moment(text: str, term: str) -> None:
    """A day is a range of time, a moment is not."""
    if len(text) != len("2026-11-20"):
        raise SearchError(term, _("say before or after: <%(value)s or >%(value)s.") % {"value": text})


def _json(piece: Piece, term: str) -> Match:
    """A text, a number, true, false or null. Numbers and texts can be compared, numbers in ranges."""
    op, text = split(piece)
    if op and not piece.quoted and _is_nearly_number(text):
        words = _("%(value)s is not a number as JSON has it. Write 0.5 or 1e-7; a text goes in quotes.")
        raise SearchError(term, words % {"value": repr(text)})
    if op:
        return Match(op, text)
    low, dots, high = piece.bare.partition("..")
    if not dots or piece.star_first:
        return _text(piece, term)
    if piece.quoted or piece.star or not (JSON_NUMBER.fullmatch(low) and JSON_NUMBER.fullmatch(high)):
        raise SearchError(term, _("a range is of two numbers, as in 1..5; other values go in quotes."))
    return Match("..", low, high)


def _json_written(match: Match, quote: Quote) -> str:
    if match.op in TEXT_OPS:
        return _text_written(match, quote)
    if match.op == "..":
        return _written(match, quote)
    return match.op + (f'"{match.value}"' if _is_nearly_number(match.value) else quote(match.value))


def _is_nearly_number(text: str) -> bool:
    return not JSON_NUMBER.fullmatch(text) and NEARLY_NUMBER.fullmatch(text) is not None


def meant(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean x?" for the closest known name, or nothing."""
    close = get_close_matches(name, list(known), n=1)
    return " " + _("Did you mean %(name)s?") % {"name": repr(close[0])} if close else ""


def split(piece: Piece) -> tuple[str, str]:
    """Return the operator at the beginning of a value, and all that follows."""
    op = next((op for op in COMPARISONS if piece.bare.startswith(op) and not piece.star_first), "")
    return op, piece.whole[len(op) :]


def span_of(text: str) -> timedelta | None:
    """Return a length of time, or None."""
    try:
        found = parse_duration(text, needs_unit=True)
    except ValueError:
        return None
    return found if timedelta(0) <= found <= MAX_SPAN else None


VALUE_TYPES = {
    "text": ValueType(_text, _text_written),
    "word": _fragment("^", gettext_lazy("say how the reference begins.")),
    "part": _fragment("=", gettext_lazy("say which words to look for.")),
    "json": ValueType(_json, _json_written),
    "status": _choice(*map(str, Status)),
    "state": _choice(*STATE_NAMES),
    "number": _ordered(_number),
    "span": _ordered(_span, _refuse_exact_age),
    "time": _ordered(_time, _refuse_moment),
}
