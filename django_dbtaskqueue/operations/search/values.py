"""Search values: how each kind of value is read from a search and written to it."""

import json
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from difflib import get_close_matches
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Union

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import BooleanField, F, Func, Value
from django.db.models.sql.compiler import SQLCompiler
from django.utils.timezone import localtime
from django.utils.translation import gettext as _, gettext_lazy

from django_dbtaskqueue.core.durations import parse_length, task_place
from django_dbtaskqueue.core.exceptions import SearchError
from django_dbtaskqueue.core.json import whole_number
from django_dbtaskqueue.core.masking import LOWER, MASKED, NAME_KEYS, VALUE_KEYS, masked, masked_text, sql_patterns
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.operations.serializers import YEARS

if TYPE_CHECKING:
    from django.utils.functional import _StrPromise

Text = Union[str, "_StrPromise"]  # translated now, or when it is shown
JSON_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]{1,4})?")
NEARLY_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
TIME_OF_DAY = re.compile(r"([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9])?")
DAY = re.compile(r"\d{4}-\d\d-\d\d")
COMPARISONS = (">=", "<=", ">", "<")
TEXT_OPS = "=^$~"
STATE_NAMES = ("due", "held", "parked", "scheduled", "stale")


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
        return self.bare + self.rest

    @property
    def whole(self) -> str:
        return "*" * self.star_first + self.text + "*" * self.star


Reader = Callable[[Piece, str], Match]  # of a value, and of its term as it was written: a ``SearchError`` names it


def _text(piece: Piece, _term: str) -> Match:
    """Every character but a star at the begin or the end is literal: ``UA*``, ``*15``, ``*A-1*``."""
    return Match(TEXT_OPS[piece.star + 2 * piece.star_first], piece.text)


def _fragment(op: str, when_empty: Text, piece: Piece, term: str) -> Match:
    """The beginning of a text (``^``), or any part of it, in any case (``=``). A star at the end changes nothing."""
    if not piece.text:
        raise SearchError(term, str(when_empty))
    if piece.star_first and op == "^":
        words = _("a plain word is how a reference begins. Write ref:%(value)s for one that contains it.")
        raise SearchError(term, words % {"value": f"*{piece.text}*"})
    return Match(op, piece.text)


def _choice(known: Sequence[str], piece: Piece, term: str) -> Match:
    text = piece.whole
    for word in known:
        if word.lower() == text.lower():
            return Match("=", word)
    near = meant(text.upper(), known) or meant(text.lower(), known)
    words = _("%(value)s is not one of %(words)s.")
    raise SearchError(term, words % {"value": repr(text), "words": ", ".join(known)} + near)


def _ordered(value: Callable[[str, str], str], unequal: Text, piece: Piece, term: str) -> Match:
    """A value that can be compared: ``3``, ``>=3``, ``1..5``. ``unequal``: what to write if only days can be equal."""
    op, text = split(piece)
    low, dots, high = text.partition("..")
    if dots and not op:
        return Match("..", value(low, term), value(high, term))
    match = Match(op or "=", value(text, term))
    if unequal and match.op == "=" and not DAY.fullmatch(match.value):
        raise SearchError(term, str(unequal) % {"name": term.lstrip("-").partition(":")[0], "value": match.value})
    return match


def _number(text: str, term: str) -> str:
    """Return a number, or an id of a Django task as it is: ``query`` asks in which table that is one."""
    if task_place(text) is not None:
        return text
    if (number := whole_number(text)) is None:
        raise SearchError(term, _("%(value)s is not a whole number. Write 3, >=3, or 1..5.") % {"value": repr(text)})
    return str(number)


def _span(text: str, term: str) -> str:
    if span_of(text) is None:
        words = _("%(value)s is not a length of time. Write >10m, <2h, or 1d..7d.")
        raise SearchError(term, words % {"value": repr(text)})
    return text


def _time(text: str, term: str) -> str:
    """Return a time in ISO 8601; a length of time, which says how long ago, as it is written."""
    if span_of(text) is not None or TIME_OF_DAY.fullmatch(text):
        return text
    try:
        found = date.fromisoformat(text) if DAY.fullmatch(text) else datetime.fromisoformat(text)
    except ValueError:
        words = _("%(value)s is not a time. Write <1h (less than an hour ago), 2026-11-20, or >=08:00.")
        raise SearchError(term, words % {"value": repr(text)}) from None
    if found.year not in YEARS:
        words = _("%(value)s is too early or too late. Write a time from the year 1970 to 2200.")
        raise SearchError(term, words % {"value": repr(text)})
    return found.isoformat()


def dated(text: str, after: str = "") -> str:
    """Return a time of day as the last moment, or the first one from ``after`` on, when a clock here showed it."""
    if not TIME_OF_DAY.fullmatch(text):
        return text
    now = localtime(datetime.now(UTC)).replace(tzinfo=None)
    moment = datetime.combine(now, time.fromisoformat(text))
    if moment > now:
        moment -= timedelta(days=1)
    return (moment + timedelta(days=after > moment.isoformat())).isoformat()


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


def written(match: Match, quote: Callable[[str], str]) -> str:
    """Return a value so that reading it gives the same match."""
    if match.op == "..":
        return f"{match.value}..{match.high}"
    if match.op in TEXT_OPS:
        return "*" * (match.op in "$~") + quote(match.value) + "*" * (match.op in "^~")
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
    with suppress(ValueError):
        return parse_length(text, needs_unit=True)
    return None


READERS: dict[str, Reader] = {
    "text": _text,
    "word": partial(_fragment, "^", gettext_lazy("say how the reference begins.")),
    "part": partial(_fragment, "=", gettext_lazy("say which words to look for.")),
    "json": _json,
    "status": partial(_choice, [*map(str, Status)]),
    "state": partial(_choice, STATE_NAMES),
    "number": partial(_ordered, _number, ""),
    "span": partial(_ordered, _span, gettext_lazy("say older, %(name)s:>%(value)s, or younger, %(name)s:<%(value)s.")),
    "time": partial(_ordered, _time, gettext_lazy("say before or after: <%(value)s or >%(value)s.")),
}


# Comparisons with errors and with values inside JSON. They see what pages show: secrets are masked.
# A match must not tell what a masked value is. So an object or a list has no text, and a text is compared after
# masking. Numbers have their shortest decimal form, texts are ordered by their characters' codes, and only A to Z
# are the same in any case: so a comparison means the same on each database. SQLite calls functions of this module.

Sql = tuple[str, Sequence[object]]
INDEX = re.compile("0|[1-9][0-9]{0,8}")  # of a list
COMPARED = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
IN_TEXT = {"^": str.startswith, "$": str.endswith, "~": str.__contains__}
IN_TEXT_SQL = {
    "^": "starts_with(shown, %s::text)",
    "$": "right(shown, length(%s::text)) = %s::text",
    "~": "strpos(shown, %s::text) > 0",
}


class _Shown(Func):
    """A comparison: SQLite calls ``function`` with the column and what follows it."""

    output_field = BooleanField()

    def as_sqlite(self, compiler: SQLCompiler, connection: Any, **given: Any) -> Any:
        """Call the function; a new connection learns it first."""
        connection.ensure_connection()
        if getattr(connection, "dbtaskqueue_taught", None) is not connection.connection:
            connection.connection.create_function("dbtaskqueue_fits", 4, _fits)
            connection.connection.create_function("dbtaskqueue_holds", 2, _holds)
            connection.dbtaskqueue_taught = connection.connection
        return super().as_sql(compiler, connection, **given)


class ErrorHolds(_Shown):
    """Whether the last error has any of these parts, in any case."""

    function = "dbtaskqueue_holds"

    def __init__(self, *parts: str) -> None:
        self.parts = [part.translate(LOWER) for part in parts]
        super().__init__(F("process_result"), Value(json.dumps(self.parts)))

    def as_postgresql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **_: object) -> Sql:
        """Look at the whole text first, because masking is slower."""
        column, _params = compiler.compile(self.source_expressions[0])
        shown, params = _masked_sql(column)
        holds = f"""strpos(lower({column} COLLATE "C"), %s) > 0 AND strpos(lower({shown} COLLATE "C"), %s) > 0"""
        sql = f"coalesce({' OR '.join([holds] * len(self.parts))}, false)"
        return sql, [one for part in self.parts for one in (part, *params, part)]


class JsonFits(_Shown):
    """Whether the value at a path of a JSON column fits any of the matches. A missing value fits none."""

    function = "dbtaskqueue_fits"

    def __init__(self, column: str, path: tuple[str, ...], matches: tuple[Match, ...]) -> None:
        self.path, self.matches = path, matches
        # A value that does not fit is not masked, because that is slow and could only make it fit if this says so.
        self.gains = any(MASKED in one.value or one.op in COMPARED for one in matches)
        given = json.dumps(path), json.dumps([(one.op, one.value, one.high) for one in matches]), self.gains
        super().__init__(F(column), *map(Value, given))

    def as_postgresql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **_: object) -> Sql:
        """Ask first what an index of the column answers."""
        column, _params = compiler.compile(self.source_expressions[0])
        value, value_params = _value_sql(column, self.path)
        text, text_params = _masked_sql("shown")
        matches = [_match_sql(match) for match in self.matches]
        fits, fit_params = " OR ".join(sql for sql, _ in matches), [param for _, some in matches for param in some]
        # MATERIALIZED: else the planner writes the value, with its masking, in the place of each of its names.
        sql = f"""\
coalesce((WITH found AS MATERIALIZED (SELECT {value} AS value), stored AS MATERIALIZED (
    SELECT jsonb_typeof(value) AS kind, value, CASE jsonb_typeof(value) WHEN 'string' THEN value #>> '{{}}'
        WHEN 'number' THEN trim_scale((value #>> '{{}}')::numeric)::text END AS shown FROM found
), seen AS MATERIALIZED (
    SELECT kind, value, CASE WHEN kind = 'string' AND (%s::bool OR {fits}) THEN {text} ELSE shown END AS shown
    FROM stored
) SELECT {fits} FROM seen), false)"""  # noqa: S608 -- values apart
        parts = self._parts()
        held = "({}) AND ".format(" OR ".join([f"{column} @> %s::jsonb"] * len(parts))) if parts else ""
        return f"({held}{sql})", [*parts, *value_params, self.gains, *fit_params, *text_params, *fit_params]

    def _parts(self) -> list[str]:
        """Return JSON of which the column holds one part if a match fits; none where only a comparison can tell."""
        if any(one.op != "=" or MASKED in one.value for one in self.matches) or any(map(INDEX.fullmatch, self.path)):
            return []
        before, after = "".join(f"{{{json.dumps(step)}:" for step in self.path), "}" * len(self.path)
        return [f"{before}{value}{after}" for match in self.matches for value in _meant(match.value)]


def _meant(text: str) -> list[str]:
    """Return as JSON what a word can mean: the text itself, and a number, true, false or null."""
    number = [number_text(Decimal(text))] if JSON_NUMBER.fullmatch(text) else []
    return [json.dumps(text), *number, *([text] if text in {"true", "false", "null"} else [])]


def number_text(number: Decimal) -> str:
    """Return the shortest decimal form of a number, without an exponent."""
    text = format(number, "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


# -- SQLite ------------------------------------------------------------------------------------------------------------

_read = lru_cache(maxsize=64)(json.loads)
_exactly = partial(json.loads, parse_int=Decimal, parse_float=Decimal)


def _holds(text: str | None, parts: str) -> bool:
    wanted = [part for part in _read(parts) if part in (text or "").translate(LOWER)]
    return bool(wanted) and any(part in masked_text(text or "").translate(LOWER) for part in wanted)


def _fits(document: str | None, path: str, matches: str, gains: int) -> bool:
    try:
        value = _exactly(document or "")
    except (ValueError, RecursionError):  # written by others
        return False
    return bool(gains or _any_matches(value, path, matches)) and _any_matches(masked(value), path, matches)


def _any_matches(value: object, path: str, matches: str) -> bool:
    for step in _read(path):
        if isinstance(value, list) and INDEX.fullmatch(step) and int(step) < len(value):
            value = value[int(step)]
        elif isinstance(value, dict) and step in value:
            value = value[step]
        else:
            return False
    return any(_matches(value, *match) for match in _read(matches))


def _matches(value: Any, op: str, wanted: str, high: str) -> bool:
    number = isinstance(value, Decimal)
    if op == "=":
        return any(type(value) is type(one) and value == one for one in map(_exactly, _meant(wanted)))
    if op == "^" and not wanted:
        return True
    if op in IN_TEXT:
        text = number_text(value) if number else value
        return isinstance(text, str) and bool(IN_TEXT[op](text, wanted))
    if not (number or isinstance(value, str)) or number != bool(JSON_NUMBER.fullmatch(wanted)):
        return False
    if op == "..":
        return bool(Decimal(wanted) <= value <= Decimal(high))
    return bool(COMPARED[op](value, Decimal(wanted) if number else wanted))


# -- PostgreSQL --------------------------------------------------------------------------------------------------------


def _masked_sql(text: str) -> Sql:
    patterns, sql = sql_patterns(), text
    for _pair in patterns.replaced:
        sql = f"regexp_replace({sql}, %s, %s, 'g')"
    params = [one for pair in patterns.replaced for one in pair]
    return f"CASE WHEN {text} ~ %s THEN {sql} ELSE {text} END", [patterns.any, *params]


def _value_sql(column: str, path: Sequence[str]) -> Sql:
    """Return the value at a path: the mask in the place of one beside the name of a secret, and nothing inside it."""
    at, params, hidden = column, list[object](), list[Sql]()
    for step in path:
        hidden.append(_hidden_sql(at, params, step))
        is_index = INDEX.fullmatch(step)  # also a key of an object
        at, params = (f"{at} #> %s::text[]", [*params, [step]]) if is_index else (f"{at} -> %s::text", [*params, step])
    *around, last = hidden
    inside = " OR ".join(sql for sql, _ in around) or "false"
    sql = f"CASE WHEN {inside} THEN NULL WHEN {last[0]} THEN to_jsonb(%s::text) ELSE {at} END"
    return sql, [*(param for _, some in hidden for param in some), MASKED, *params]


def _hidden_sql(parent: str, params: Sequence[object], step: str) -> Sql:
    """Return the condition that what stands beside a value names a secret, as ``masked`` finds it."""
    name = sql_patterns().name
    if step.translate(LOWER) in VALUE_KEYS:
        return (
            f"EXISTS (SELECT FROM jsonb_each(CASE jsonb_typeof({parent}) WHEN 'object' THEN {parent} END) AS one WHERE"
            """ lower(one.key COLLATE "C") = ANY(%s::text[]) AND jsonb_typeof(one.value) = 'string'"""
            " AND one.value #>> '{}' ~ %s)",
            [*params, *params, list(NAME_KEYS), name],
        )
    if step == "1":
        first = f"{parent} #> '{{0}}'"
        is_text = f"jsonb_typeof({parent}) = 'array' AND jsonb_typeof({first}) = 'string'"
        return f"({is_text} AND {parent} #>> '{{0}}' ~ %s)", [*params, *params, *params, name]
    return "false", []


def _match_sql(match: Match) -> Sql:
    op, wanted = match.op, match.value
    if op in IN_TEXT_SQL:
        sql = "kind IS NOT NULL" if op == "^" and not wanted else IN_TEXT_SQL[op]
        return sql, [wanted] * sql.count("%s")
    if op == "=":
        meant = _meant(wanted)
        value = "CASE kind WHEN 'string' THEN to_jsonb(shown) ELSE value END"
        return f"{value} IN ({', '.join(['%s::jsonb'] * len(meant))})", meant
    if op != ".." and not JSON_NUMBER.fullmatch(wanted):
        return f"""CASE kind WHEN 'string' THEN shown COLLATE "C" {op} %s::text END""", [wanted]
    within, params = ("BETWEEN %s::numeric AND", [wanted, match.high]) if op == ".." else (op, [wanted])
    return f"CASE kind WHEN 'number' THEN shown::numeric {within} %s::numeric END", params
