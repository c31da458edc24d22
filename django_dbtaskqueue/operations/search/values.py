"""How the values of a search are read and written, by the kind of what they are compared with."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from difflib import get_close_matches

from django.core.exceptions import ImproperlyConfigured
from django.utils.translation import gettext as _

from django_dbtaskqueue.core.durations import duration
from django_dbtaskqueue.core.exceptions import SearchError
from django_dbtaskqueue.core.states import Status

MOST = 2**63 - 1
NUMBER = re.compile(r"-?\d{1,19}")
JSON_NUMBER = re.compile(r"-?\d{1,18}(\.\d{1,18})?")
SPAN = re.compile(r"P[\dDTHMS.]+|\d+(\.\d+)?(ms|s|m|h|d)")
LONGEST = timedelta(days=36_500)
COMPARISONS = (">=", "<=", ">", "<")
STATES = ("due", "held", "parked", "scheduled", "stale")

Quote = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Match:
    """One alternative of a term."""

    op: str  # "=", "^" (begins with), ">", ">=", "<", "<=", or ".." (from ``value`` to ``high``, both included)
    value: str
    high: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """A value as it was written: ``bare`` up to the first quote, ``rest`` from there on with the quotes taken off."""

    bare: str
    rest: str = ""
    star: bool = False  # a bare star ended it; it stands in neither of the two
    quoted: bool = False

    @property
    def text(self) -> str:
        """Without the star."""
        return self.bare + self.rest

    @property
    def whole(self) -> str:
        """With the star, for kinds that know none."""
        return self.text + "*" * self.star


class Kind:
    """Reads a value and writes it again, so that reading what was written gives the same."""

    def read(self, piece: Piece, written: str) -> Match:
        """Return the match of one value, or raise ``SearchError`` naming the term as it was ``written``."""
        raise SearchError(written, f"{piece.whole!r} cannot be looked for.")

    def write(self, match: Match, quote: Quote) -> str:
        """Return the value as a search holds it."""
        if match.op == "..":
            return f"{match.value}..{match.high}"
        return f"{'' if match.op == '=' else match.op}{match.value}"


class Text(Kind):
    """A text: the same, or with a star at the end how it begins."""

    def read(self, piece: Piece, written: str) -> Match:
        """Every sign but a star at the end stands for itself."""
        return Match("^" if piece.star else "=", piece.text)

    def write(self, match: Match, quote: Quote) -> str:
        """Quoted where need be."""
        return quote(match.value) + ("*" if match.op == "^" else "")


class Word(Kind):
    """How a text begins."""

    def read(self, piece: Piece, written: str) -> Match:
        """A star at the end says the same."""
        if not piece.text:
            raise SearchError(written, _("say how the reference begins."))
        return Match("^", piece.text)

    def write(self, match: Match, quote: Quote) -> str:
        """Quoted where need be."""
        return quote(match.value)


class Part(Kind):
    """A part of a text, in any case."""

    def read(self, piece: Piece, written: str) -> Match:
        """A star at the end changes nothing."""
        if not piece.text:
            raise SearchError(written, _("say which words to look for."))
        return Match("=", piece.text)

    def write(self, match: Match, quote: Quote) -> str:
        """Quoted where need be."""
        return quote(match.value)


@dataclass(frozen=True)
class Choice(Kind):
    """One of a few words, in any case."""

    words: tuple[str, ...]

    def read(self, piece: Piece, written: str) -> Match:
        """Refuse other words, with the nearest one."""
        text = piece.whole
        for word in self.words:
            if word.lower() == text.lower():
                return Match("=", word)
        known = {"value": repr(text), "words": ", ".join(self.words)}
        near = meant(text.upper(), self.words) or meant(text.lower(), self.words)
        raise SearchError(written, _("%(value)s is none of %(words)s.") % known + near)


class Ordered(Kind):
    """A value that can be compared: ``3``, ``>=3``, ``1..5``."""

    example = ""

    def read(self, piece: Piece, written: str) -> Match:
        """Take the operator off, and judge what is left."""
        op, text = split(piece)
        low, dots, high = text.partition("..")
        if dots and not op:
            return Match("..", self.value(low, written), self.value(high, written))
        return self.judged(Match(op or "=", self.value(text, written)), written)

    def value(self, text: str, written: str) -> str:
        """Return a value in its one form, or raise ``SearchError``."""
        raise SearchError(written, f"{text!r} cannot be compared.")

    def judged(self, match: Match, written: str) -> Match:
        """Return the match, or raise ``SearchError`` for an operator that makes no sense."""
        return match


class Number(Ordered):
    """A whole number."""

    def value(self, text: str, written: str) -> str:
        """As the database's bigint holds it."""
        if not NUMBER.fullmatch(text) or abs(int(text)) > MOST:
            raise SearchError(
                written, _("%(value)s is no whole number. Write 3, >=3, or 1..5.") % {"value": repr(text)}
            )
        return str(int(text))


class Span(Ordered):
    """A length of time."""

    def value(self, text: str, written: str) -> str:
        """As people write it."""
        if span_of(text) is None:
            words = _("%(value)s is no length of time. Write >10m, <2h, or 1d..7d.")
            raise SearchError(written, words % {"value": repr(text)})
        return text

    def judged(self, match: Match, written: str) -> Match:
        """Nothing is exactly ten minutes old."""
        if match.op == "=":
            name = written.lstrip("-").partition(":")[0]
            words = _("say older, %(name)s:>%(value)s, or younger, %(name)s:<%(value)s.")
            raise SearchError(written, words % {"name": name, "value": match.value})
        return match


class Time(Ordered):
    """A time: how long ago, or a date, or a date and time."""

    def value(self, text: str, written: str) -> str:
        """A time in ISO 8601, a length of time as it is written."""
        if span_of(text) is not None:
            return text
        try:
            if re.fullmatch(r"\d{4}-\d\d-\d\d", text):
                return date.fromisoformat(text).isoformat()
            return datetime.fromisoformat(text).isoformat()
        except ValueError:
            words = _("%(value)s is no time. Write <1h (less than an hour ago), 2026-11-20, or >=2026-11-20T08:00.")
            raise SearchError(written, words % {"value": repr(text)}) from None

    def judged(self, match: Match, written: str) -> Match:
        """A day is a time to be in, a moment is not."""
        if match.op == "=" and len(match.value) != len("2026-11-20"):
            words = _("say before or after: <%(value)s or >%(value)s.")
            raise SearchError(written, words % {"value": match.value})
        return match


class Json(Text):
    """A value inside JSON: a text, a number, true, false or null."""

    def read(self, piece: Piece, written: str) -> Match:
        """Numbers and texts can be compared, numbers in ranges."""
        op, text = split(piece)
        if op:
            return Match(op, text)
        low, dots, high = piece.bare.partition("..")
        if not dots:
            return super().read(piece, written)
        if piece.quoted or piece.star or not (JSON_NUMBER.fullmatch(low) and JSON_NUMBER.fullmatch(high)):
            raise SearchError(written, _("a range is of two numbers, as in 1..5; other values go in quotes."))
        return Match("..", low, high)

    def write(self, match: Match, quote: Quote) -> str:
        """Quoted where need be."""
        if match.op in ("=", "^"):
            return super().write(match, quote)
        return f"{match.value}..{match.high}" if match.op == ".." else f"{match.op}{quote(match.value)}"


def meant(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean x?" for the closest known name, or nothing."""
    close = get_close_matches(name, list(known), n=1)
    return " " + _("Did you mean %(name)s?") % {"name": repr(close[0])} if close else ""


def split(piece: Piece) -> tuple[str, str]:
    """Return the operator at the beginning of a value, and all that follows."""
    op = next((op for op in COMPARISONS if piece.bare.startswith(op)), "")
    return op, piece.whole[len(op) :]


def span_of(text: str) -> timedelta | None:
    """Return a length of time, or None when it is none."""
    if not SPAN.fullmatch(text):
        return None
    try:
        found = duration(text, where="")
    except (ImproperlyConfigured, OverflowError):
        return None
    return found if timedelta(0) <= found <= LONGEST else None


KINDS: dict[str, Kind] = {
    "text": Text(),
    "word": Word(),
    "part": Part(),
    "json": Json(),
    "status": Choice(tuple(str(status) for status in Status)),
    "state": Choice(STATES),
    "number": Number(),
    "span": Span(),
    "time": Time(),
}
