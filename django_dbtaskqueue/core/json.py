"""JSON text of a row: written, checked and read.

A value that :func:`dumps` accepts comes back from PostgreSQL ``jsonb`` and from SQLite as the same value of the same
types, with the exceptions JSON itself makes: a tuple comes back as a list, a subclass of str, int, float, list or dict
as its base, and jsonb keeps neither the order of keys nor the sign of ``-0.0``. An error names the place of others.
"""

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from inspect import isasyncgen, isawaitable, iscoroutine, isgenerator
from json import encoder as json_encoder
from typing import Any, NoReturn, TypeAlias, TypeGuard

from django_dbtaskqueue.core.exceptions import PayloadError
from django_dbtaskqueue.core.masking import Unreadable

try:
    import orjson
except ImportError:  # the "speed" extra is not installed
    orjson = None  # type: ignore[assignment,unused-ignore]

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"
DEEPEST = 500  # SQLite stops at 1000 levels, Python at 1000 frames for the caller and the encoder together
MAX_NAME_CHARS = 200  # of a reference, a group, a tag, a batch, a step, a signal, a parent; texts of errors say so
MAX_WHOLE_NUMBER = 2**63 - 1  # of a database
WHOLE_NUMBER = re.compile(r"-?[0-9]{1,19}")
INT_DIGITS = 4300  # what Python reads back by default; a jsonb number would hold 131,072


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one payload may hold: ``depth`` nested containers (at most 500), ``size`` bytes of UTF-8."""

    depth: int = 100
    size: int = 1024 * 1024

    def __post_init__(self) -> None:
        if not (1 <= self.depth <= DEEPEST and self.size >= 1):
            raise ValueError(f"Payload limits are a depth of 1 to {DEEPEST} and a size of 1 byte or more, not {self}.")


DEFAULT_LIMITS = Limits()

if orjson is not None:
    # Without these two options orjson would write dataclasses and dates in a form that does not come back.
    ORJSON_OPTIONS = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
BIG_EXPONENT = re.compile(rb"e[+1-9]").search  # 1e+16, by older versions of orjson 1e16
STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')


def dumps(value: object, *, limits: Limits = DEFAULT_LIMITS) -> str:
    """Return compact JSON text for ``value``; PayloadError names the place and the fix when a database cannot hold it.

    Refused: NUL characters and lone surrogates, NaN and Infinity, keys that are not str, types JSON does not have,
    integers of more than 4,300 digits, circular references, more than ``limits`` allow.
    """
    if orjson is not None:
        try:
            text = (raw := orjson.dumps(value, None, ORJSON_OPTIONS)).decode()
            if (
                len(raw) <= limits.size
                and (len(raw) <= 2 * limits.depth or raw.count(b"[") + raw.count(b"{") <= limits.depth)
                and "\\u0000" not in text  # ``in`` of bytes would first raise an error, and catch it
                and (BIG_EXPONENT(raw) is None or BIG_EXPONENT(STRINGS.sub(b"", raw)) is None)
                and orjson.loads(raw) == value  # orjson writes NaN, UUID and Enum too, but they do not come back equal
            ):
                return text
        except (TypeError, ValueError, RecursionError):
            pass  # the careful pass knows more types, and the reason
    return _careful(value, limits)


def _careful(value: object, limits: Limits) -> str:
    try:
        text = with_big_floats(_encode(value))
        size = len(text) if text.isascii() else len(text.encode())
        # This process may be set to write longer integers than others read.
        giant = len(text) > INT_DIGITS and sys.get_int_max_str_digits() != INT_DIGITS
        fine = not giant and "\\u0000" not in text and _well_shaped(value, text, limits.depth)
    except (TypeError, ValueError, RecursionError) as error:  # ValueError: NaN, surrogates, integers too long to write
        path, reason = find_fault(value, limits) or ("", str(error))
        raise PayloadError(reason, path=path) from error
    if not fine and (fault := find_fault(value, limits)):
        raise PayloadError(fault[1], path=fault[0])
    if size > limits.size:
        raise PayloadError(
            f"it takes {size:,} bytes as JSON and {limits.size:,} are allowed. Store the bulk elsewhere and put its "
            "key or address into the payload, or raise the payload size limit."
        )
    return text


def _encoder() -> Callable[[object], str]:
    plain = json.JSONEncoder(ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":"))
    if (c_make_encoder := getattr(json_encoder, "c_make_encoder", None)) is None:
        return plain.encode
    # JSONEncoder makes this object anew for each call, which costs as much as the encoding of a small payload.
    chunks = c_make_encoder(None, plain.default, json_encoder.encode_basestring, None, ":", ",", False, False, False)
    return lambda value: "".join(chunks(value, 0))


_encode = _encoder()


def _well_shaped(value: object, text: str, depth: int) -> bool:
    """Return whether nesting is within ``depth``; TypeError for a key that is not str. Looks inside only if needed."""
    objects = text.count("{")
    if objects + text.count("[") <= depth:
        if not objects:
            return True
        if objects == 1 and isinstance(value, dict):
            "".join(value)
            return True
    return _levels_fit(value, depth)


_SCALARS = frozenset({str, int, float, bool, type(None)})


def _levels_fit(value: object, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        dicts = [item for item in level if isinstance(item, dict)]
        lists = [item for item in level if isinstance(item, list | tuple)]
        for item in dicts:
            "".join(item)
        level = [child for item in dicts for child in item.values() if type(child) not in _SCALARS]
        level += [child for item in lists for child in item if type(child) not in _SCALARS]
        if not level:
            return True
    return False


_big_floats = re.compile(r'"(?:[^"\\]|\\.)*"|(-?[0-9.]+e\+[0-9]+)')


def with_big_floats(text: str) -> str:
    """Return JSON text with 10000000000000000.0 for 1e+16, which jsonb would hand back as an integer."""
    if "e+" not in text:
        return text
    return _big_floats.sub(lambda token: token[0] if token[1] is None else f"{float(token[1]):.1f}", text)


def find_fault(value: object, limits: Limits = DEFAULT_LIMITS) -> tuple[str, str] | None:
    """Return (path, reason) of the first thing in ``value`` that ``dumps`` refuses, or None. Size is not looked at.

    The path leads to the culprit; for a faulty key to the mapping that holds it.
    """
    trail: list[str | int] = []
    reason = _fault(value, trail, set(), limits.depth)
    return (path_of(trail), reason) if reason else None


_BARE_STEP = re.compile("[A-Za-z_][A-Za-z0-9_]*").fullmatch


def path_of(steps: Iterable[object]) -> str:
    """Return steps as a path: ``["items", 3, "when"]`` is ``items[3].when``; odd keys are quoted: ``["a b"]``."""
    parts = (f".{step}" if _BARE_STEP(str(step)) else f"[{json.dumps(step)}]" for step in steps)
    return "".join(parts).removeprefix(".")


def _fault(value: object, trail: list[str | int], parents: set[int], depth: int) -> str | None:
    """Return what is wrong with ``value`` or inside it; ``trail`` is left pointing at the culprit."""
    if not isinstance(value, dict | list | tuple):
        return _scalar_fault(value)
    if id(value) in parents:
        return "is a circular reference: it contains itself. Store a key that names it instead"
    if len(parents) == depth:
        return f"is nested deeper than {depth} levels. Flatten it, or raise the payload depth limit"
    parents.add(id(value))
    for step, child in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(value, dict) and (reason := _key_fault(step)):
            return reason
        trail.append(step)
        if reason := _fault(child, trail, parents, depth):
            return reason
        trail.pop()
    parents.discard(id(value))
    return None


def _key_fault(key: object) -> str | None:
    if not isinstance(key, str):
        return f"has the key {short_repr(key)} of type {type(key).__name__}, and JSON keys are text. Use str(key)"
    reason = _text_fault(key)
    return f"has the key {short_repr(key)}, which {reason}" if reason else None


ODD = re.compile("[\x00\ud800-\udfff]")


def is_storable(text: str) -> bool:
    """Whether the database can store a text: it has no NUL character and no lone surrogate."""
    return ODD.search(text) is None


def whole_number(text: str) -> int | None:
    """Return the whole number that a text in ASCII digits means; None for another text, or for more than 64 bits."""
    number = int(text) if WHOLE_NUMBER.fullmatch(text) else None
    return None if number is None or abs(number) > MAX_WHOLE_NUMBER else number


def is_name(value: object) -> TypeGuard[str]:
    """Whether it is text of 1 to 200 characters, which a database can store."""
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME_CHARS and is_storable(value)


def _text_fault(text: str) -> str | None:
    if (odd := ODD.search(text)) is None:
        return None
    name = "the NUL character U+0000" if odd[0] == "\0" else f"the lone surrogate U+{ord(odd[0]):04X}"
    return f"holds {name} at index {odd.start()}, which databases refuse. Use clean_text(), or base64 for binary data"


def _scalar_fault(value: object) -> str | None:
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, str):
        return _text_fault(value)
    if isinstance(value, int):
        digits = min(INT_DIGITS, sys.get_int_max_str_digits() or INT_DIGITS)
        giant = value.bit_length() > digits * 3 and abs(value) >= 10**digits
        return f"is an integer of more than {digits:,} digits, the most Python reads back. Use hex()" if giant else None
    if isinstance(value, float):
        return None if math.isfinite(value) else f"is {float(value)!r}, and JSON has no such number. Use None or text"
    if isinstance(value, Unreadable):
        return f"is unreadable. {value}"
    return f"is {short_repr(value)} of type {type(value).__name__}, which JSON does not have. {_hint(value)}"


_HINTS = {
    "date": "isoformat()",  # and datetime, its subclass
    "time": "isoformat()",
    "timedelta": "total_seconds()",
    "bytes": "base64.b64encode()",
    "Enum": ".value",
    "BaseModel": 'model_dump(mode="json")',
    "set": "list()",
    "frozenset": "list()",
}


def _hint(value: object) -> str:
    if hasattr(value, "__dataclass_fields__"):
        return "Pass the dataclass itself as the whole payload, or use dataclasses.asdict()"
    how = next((_HINTS[base.__name__] for base in type(value).__mro__ if base.__name__ in _HINTS), "str()")
    return f"Use {how}, or a dataclass as the payload: its typed fields are converted"


def short_repr(value: object, max_chars: int = 80) -> str:
    """Return ``repr(value)`` in printable ASCII, cut at ``max_chars``. Never raises."""
    try:
        text = ascii(value)
    except Exception:
        return f"<{type(value).__name__} whose repr() fails>"
    return text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."


_TO_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_LONG_RUN = b"0" * 19


def loads(text: str | bytes) -> JSON:
    """Return the value of JSON text from a row, integers of any size exact; PayloadError when it is not JSON."""
    try:
        raw = text.encode() if isinstance(text, str) else text
        # orjson turns integers beyond 64 bits into floats. 19 digits in a row are rare enough for the slower reader.
        if orjson is not None and (len(raw) < 19 or _LONG_RUN not in raw.translate(_TO_ZEROS)):
            fast: JSON = orjson.loads(raw)
            return fast
        value: JSON = json.loads(raw.decode(), parse_constant=_refuse_number, parse_float=_finite)
        if b"\\u" in raw:
            json.dumps(value, ensure_ascii=False).encode()  # raises for lone surrogates, which orjson refuses as well
        return value
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"not JSON ({error}): {short_repr(text)}", cannot="be read") from error


def loads_exactly(text: str | bytes) -> Any:
    """Return the value of JSON that a person or a program wrote; ``ValueError`` for a key that occurs twice."""
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, number in Counter(key for key, _ in pairs).items() if number > 1)
        raise ValueError(f"the key {short_repr(twice)} occurs twice")
    return found


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse_number(text)


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"the number {text} is not finite")


def read(text: str | bytes, words: str = "%(reason)s") -> "JSON | Unreadable":
    """Return what ``loads`` does, or ``words`` with the reason why it cannot be read or is too deep. Never raises."""
    try:
        value, raw = loads(text), text.encode() if isinstance(text, str) else text
        fits = raw.count(b"[") + raw.count(b"{") <= DEEPEST or _levels_fit(value, DEEPEST)
        return value if fits else Unreadable(words % {"reason": f"it is nested deeper than {DEEPEST} levels"})
    except PayloadError as error:
        return Unreadable(words % {"reason": error.__cause__})


def kept(of: str, value: object, limits: Limits = DEFAULT_LIMITS) -> str | None:
    """Return the JSON text of a result or the like; None for None. ``of`` names it in errors.

    Raises ``PayloadError`` as ``dumps``, and ``TypeError`` for a coroutine or a generator, whose code has not run.
    """
    try:
        return None if value is None else dumps(value, limits=limits)
    except PayloadError as error:
        if isawaitable(value) or isgenerator(value) or isasyncgen(value):
            if iscoroutine(value):
                value.close()  # else Python warns that nobody awaited it
            raise TypeError(
                f"{of} is {short_repr(value)}, whose code has not run. Await it, or return a value."
            ) from None
        raise PayloadError(error.reason, path=error.path, of=of) from error


def clean_text(text: str) -> str:
    """Return ``text`` with each NUL and each lone surrogate replaced by U+FFFD."""
    return ODD.sub("\ufffd", text)


def cut_bytes(text: str, limit: int = 4000) -> str:
    """Return the start of ``clean_text(text)``, at most ``limit`` bytes of UTF-8, never cut inside a character."""
    return clean_text(text[:limit]).encode()[:limit].decode(errors="ignore")


def tail_bytes(text: str, limit: int = 4000) -> str:
    """Return the end of ``clean_text(text)``, at most ``limit`` bytes of UTF-8, never cut inside a character."""
    raw = clean_text(text[max(len(text) - limit, 0) :]).encode()
    return raw[max(len(raw) - limit, 0) :].decode(errors="ignore")


def dumps_many(values: list[object], *, limits: Limits = DEFAULT_LIMITS) -> list[bytes] | None:
    """Return what ``dumps`` returns for each value, as UTF-8. A few checks cover all values together.

    None if one of them is refused or needs the careful check: ``dumps`` of each then tells which one, and where in it.
    """
    try:
        one_by_one = (dumps(value, limits=limits).encode() for value in values)
        return list(one_by_one) if orjson is None else _together(values, limits)
    except (TypeError, ValueError, RecursionError, PayloadError):
        return None


def _together(values: list[object], limits: Limits) -> list[bytes] | None:
    write, options = orjson.dumps, ORJSON_OPTIONS
    raws = [write(value, None, options) for value in values]
    together = b"[" + b",".join(raws) + b"]"
    if b"\\u0000" in together or orjson.loads(together) != values:
        return None
    if BIG_EXPONENT(together) is not None and BIG_EXPONENT(STRINGS.sub(b"", together)) is not None:
        return None
    for raw in raws:
        if len(raw) > 2 * limits.depth and raw.count(b"[") + raw.count(b"{") > limits.depth:
            return None
    return None if len(together) > limits.size and any(len(raw) > limits.size for raw in raws) else raws


def array(values: Sequence[object]) -> str:
    """Return a JSON array of what we made ourselves: texts without lone surrogates, numbers, and objects of these."""
    return json.dumps(values, ensure_ascii=False) if orjson is None else orjson.dumps(values).decode()
