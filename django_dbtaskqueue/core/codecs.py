"""Typed payloads: a processor gets the class and the values that the caller enqueued.

The JSON is readable: objects by field name, dates and durations in ISO 8601, Decimal and UUID as text, bytes as base64,
enum members by value if all values are str or all are int, else by name. Union members that JSON cannot tell apart are
stored as ``{"@type": "date", "@value": "2013-01-31"}``. Fields with ``init=False`` are left to the constructor. A
PayloadError names the path, the expected type and the value, or the class and the field that has no JSON form.
"""

import json
import re
import sys
import typing
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import MISSING, InitVar, dataclass, fields, is_dataclass, replace
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache, partial
from itertools import count, cycle
from typing import NotRequired, Required, TypeGuard, TypeVar
from uuid import UUID

from django_dbtaskqueue.core import masking
from django_dbtaskqueue.core.durations import iso_duration, parse_duration
from django_dbtaskqueue.core.exceptions import PayloadError, dotted, near_match
from django_dbtaskqueue.core.json import path_of, short_repr

NONE_TYPE = type(None)
JSON_TYPES: Set[type] = frozenset({dict, list, str, int, float, bool, NONE_TYPE})
MAX_TYPE_NAME = 200  # characters of the column
ANY_JSON = typing.Any  # as an annotation: JSON that stays as it is
MODEL_INPUT = re.compile(r"input_value=.*, (?=input_type=)")  # a value of which pydantic does not say the name beside
Step = Callable[..., object]  # takes one value, and each step takes values of its own type only
K = TypeVar("K")


class _Mismatch(Exception):
    def __init__(self, expected: str, value: object, why: object = "") -> None:
        self.steps: list[object] = []  # path to the value; the innermost step comes first
        why = MODEL_INPUT.sub("", f" ({why})") if why else ""
        super().__init__(f"expected {expected}, got {type(value).__name__} {short_repr(value)}{why}")


@dataclass(slots=True)
class _Codec:
    name: str
    kinds: Set[type]  # JSON types of the encoded form
    encode: Step
    decode: Step
    same: Set[type] = frozenset()  # classes whose instances are the same in JSON, so that no step is called
    rank: int = 0  # a union tries low ranks first: str, int and float also accept subclasses and other numbers


@lru_cache(maxsize=1024)
def type_name(cls: type) -> str:
    """Return a payload class as rows name it: its ``payload_type`` if that is a str, else its dotted path."""
    name = _given_name(cls) or dotted(cls)
    if len(name) > MAX_TYPE_NAME:
        raise PayloadError(
            f"the name {name!r} has over {MAX_TYPE_NAME} characters. Give the class a shorter one: payload_type = '…'",
            path=cls.__qualname__,
        )
    return name


def short_name(cls: type) -> str:
    """Return the name of a payload class without its module: how unions name it."""
    return _given_name(cls) or cls.__qualname__


def _given_name(cls: type) -> str | None:
    name = getattr(cls, "payload_type", None)
    return name if isinstance(name, str) and name else None


def encode(value: object, declared: object = None) -> tuple[str | None, object]:
    """Return (type name, JSON-ready value). Plain JSON has the name None and is encoded as ``declared``."""
    cls = type(value)
    if cls in JSON_TYPES:
        return None, value if declared is None else _run(build_codec(declared).encode, value)
    if is_record(cls) or is_model(cls):
        return type_name(cls), _run(build_codec(cls).encode, value)  # type: ignore[arg-type]  # a class is hashable
    return None, _run(build_codec(declared).encode, value)


def decode(cls: object, plain: object) -> object:
    """Return ``plain`` as a ``cls``; None, Any and dict leave it unchanged. Unknown and missing fields are errors."""
    return _run(build_codec(cls).decode, plain, cannot="be read")


def build_codec(cls: object) -> _Codec:
    """Build and cache the codec of a payload class. Raise PayloadError for an annotation that has no JSON form."""
    hint = ANY_JSON if cls is None or cls is dict or cls is object else cls
    if (codec := _codecs.get(hint)) is None:
        memo = dict(_codecs)  # other threads see the new codecs only when all of them are complete
        codec = _build(hint, memo)
        masking.learn(hint)
        _codecs.update(memo)
    return codec


def _run(step: Step, value: object, *, cannot: str = "be stored") -> object:
    try:
        return step(value)
    except _Mismatch as error:
        # What has led to it may show a masked value, and not the name that a mask finds it by.
        hidden = any(masking.is_masked(str(one)) for one in error.steps)
        path = path_of(error.steps[::-1])
        raise PayloadError(str(error), path=path, cannot=cannot) from None if hidden else error.__cause__
    except RecursionError as error:
        raise PayloadError("it is nested too deep, or contains itself", cannot=cannot) from error


def _codec(name: str, kinds: Set[type], exact: Set[type], write: Step, read: Step, fits: Step | None = None) -> _Codec:
    # It encodes ``exact`` classes and what ``fits`` accepts. Every error of its steps becomes a _Mismatch.
    def guarded(types: Set[type], step: Step, fits: Step | None = None) -> Step:
        def run(value: object) -> object:
            try:
                if type(value) in types or (fits is not None and fits(value)):
                    return step(value)
            except (_Mismatch, RecursionError):
                raise
            except Exception as error:  # constructors and parsers may raise anything
                raise _Mismatch(name, value, error) from None if MODEL_INPUT.search(str(error)) else error
            raise _Mismatch(name, value)

        return run

    return _Codec(name, kinds, guarded(exact, write, fits), guarded(kinds, read))


def _leaf(cls: type, kind: type, write: Step, read: Step, *, but: type | tuple[()] = (), rank: int = 0) -> _Codec:
    write = _back_again(write, read, None if cls is time else cls)
    codec = _codec(cls.__name__, {kind}, {cls}, write, read, lambda v: isinstance(v, cls) and not isinstance(v, but))
    return replace(codec, same={cls} & {kind}, rank=rank)


def _back_again(write: Step, read: Step, sure: object) -> Step:
    """Return ``write`` for what is read back as it was: each value of the class ``sure``, and of others not each."""

    def checked(value: object) -> object:
        plain = write(value)
        if type(value) is not sure and not _same_value(value, read(plain)):
            raise ValueError("it would be read back as another value")
        return plain

    return checked


def _same_value(one: typing.Any, other: typing.Any) -> bool:
    """Whether two values are equal, of models their fields. A tuple is a list, as in plain JSON."""
    if isinstance(one, datetime | time) and one.tzinfo:
        # A time of day may lose its zone. Dates of two zones are never equal in an hour that a clock repeats or skips.
        return bool(other.tzinfo) and (one - other == timedelta(0) if isinstance(one, datetime) else one == other)
    if is_model(type(one)) and type(one) is type(other):
        one, other = ({n: getattr(m, n) for n in type(m).model_fields} | (m.model_extra or {}) for m in (one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same_value(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same_value, one, other))
    return bool(one == other or (one != one and other != other))  # NaN


def _same(value: object) -> object:
    return value


def _fits_float(value: object) -> bool:
    return isinstance(value, float) or (type(value) is int and float(value) == value)


def _read_duration(text: str) -> timedelta:
    if not text.startswith(("P", "-P")):  # other text may be of another member of a union
        raise ValueError("a duration is ISO 8601 text, such as PT1M30.5S")
    return parse_duration(text)


_ANY = _Codec("any JSON value", JSON_TYPES, _same, _same, JSON_TYPES)
_codecs: dict[object, _Codec] = {
    ANY_JSON: _ANY,
    str: _leaf(str, str, _same, _same, rank=1),
    int: _leaf(int, int, _same, _same, but=bool, rank=1),
    float: replace(_codec("float", {float, int}, {float}, float, float, _fits_float), same={float}, rank=2),
    bool: _leaf(bool, bool, _same, _same),
    NONE_TYPE: replace(_codec("None", {NONE_TYPE}, {NONE_TYPE}, _same, _same), same={NONE_TYPE}, rank=3),
    datetime: _leaf(datetime, str, datetime.isoformat, datetime.fromisoformat),
    date: _leaf(date, str, date.isoformat, date.fromisoformat, but=datetime),
    time: _leaf(time, str, time.isoformat, time.fromisoformat),
    timedelta: _leaf(timedelta, str, iso_duration, _read_duration),
    Decimal: _leaf(Decimal, str, str, Decimal),
    UUID: _leaf(UUID, str, str, UUID),
    bytes: _leaf(bytes, str, lambda value: b64encode(value).decode(), lambda plain: b64decode(plain, validate=True)),
}
_ARRAYS: dict[object, type] = {list: list, Sequence: list, set: set, Set: set, frozenset: frozenset, tuple: tuple}


def _build(hint: object, memo: dict[object, _Codec]) -> _Codec:
    return memo[hint] if hint in memo else memo.setdefault(hint, _make(hint, memo))


def _make(hint: object, memo: dict[object, _Codec]) -> _Codec:
    origin, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    if target := getattr(hint, "__supertype__", None) or getattr(hint, "__value__", None):  # NewType, type X = ...
        return _build(target, memo)
    if origin in {typing.Union, type(int | str)}:
        return _union([_build(arg, memo) for arg in args])
    if origin is typing.Literal:
        return _choice(str(hint), [(arg, _build(type(arg), memo).encode(arg)) for arg in args])
    if origin in {dict, Mapping}:
        return _dict(*(_build(arg, memo) for arg in args or (str, ANY_JSON)))
    if origin in _ARRAYS:
        items = [_build(arg, memo) for arg in args or (ANY_JSON, ...) if arg is not ...]
        return _array(_ARRAYS[origin], items, fixed=origin is tuple and bool(args) and args[-1] is not ...)
    if isinstance(hint, type) and issubclass(hint, Enum):
        by_value = {type(member.value) for member in hint} in ({str}, {int})
        return _choice(hint.__qualname__, [(member, member.value if by_value else member.name) for member in hint])
    if is_model(hint):
        write = partial(hint.model_dump, mode="json", round_trip=True, warnings="error")

        def read(plain: object) -> object:
            return hint.model_validate_json(json.dumps(plain), by_name=True, by_alias=True)

        return _codec(short_name(hint), JSON_TYPES, {hint}, _back_again(write, read, None), read)
    if isinstance(hint, type) and is_record(hint):
        return _record(hint, memo)
    raise PayloadError(f"{hint!r} has no JSON form. Use a dataclass, container, number, date, str, Enum or Any")


def _choice(name: str, pairs: list[tuple[object, object]]) -> _Codec:
    written = {(type(value), value): plain for value, plain in pairs}
    known = {(type(plain), plain): value for value, plain in pairs}
    exact, kinds = ({kind for kind, _ in keys} for keys in (written, known))
    return _codec(name, kinds, exact, lambda v: written[type(v), v], lambda p: known[type(p), p])


def _convert_each(verb: str, items: Iterable[tuple[K, _Codec, object]]) -> dict[K, object]:
    done: dict[K, object] = {}
    for key, codec, value in items:
        try:
            done[key] = value if type(value) in codec.same else getattr(codec, verb)(value)
        except _Mismatch as error:
            error.steps.append(key)
            raise
    return done


def _array(cls: type, items: list[_Codec], *, fixed: bool) -> _Codec:
    def convert(verb: str, values: Sequence[object] | Set[object]) -> Iterable[object]:
        if fixed and len(values) != len(items):
            raise ValueError(f"{len(items)} items are expected, and there are {len(values)}")
        return _convert_each(verb, zip(count(), items if fixed else cycle(items), values, strict=False)).values()

    name = f"{cls.__name__}[{', '.join(item.name for item in items)}]"
    return _codec(name, {list}, {cls}, lambda v: list(convert("encode", v)), lambda p: cls(convert("decode", p)))


def _dict(key: _Codec, item: _Codec) -> _Codec:
    as_text = key.kinds <= {str} or key is _ANY  # other keys become the JSON text of their encoded form

    def write(value: dict[object, object]) -> dict[object, object]:
        keys = [key.encode(one) if as_text else json.dumps(key.encode(one)) for one in value]
        return _convert_each("encode", ((name, item, one) for name, one in zip(keys, value.values(), strict=True)))

    def read(plain: dict[str, object]) -> dict[object, object]:
        values = _convert_each("decode", ((name, item, one) for name, one in plain.items())).values()
        return dict(zip((key.decode(one if as_text else json.loads(one)) for one in plain), values, strict=True))

    return _codec(f"dict[{key.name}, {item.name}]", {dict}, {dict}, write, read)


def _union(members: list[_Codec]) -> _Codec:
    members.sort(key=lambda codec: codec.rank)
    by_name = {codec.name: codec for codec in members}
    if len(by_name) < len(members):
        raise PayloadError(f"two members of a union have one name, of {[*by_name]}. Give one class a payload_type")
    claims = [kind for codec in members if codec.rank < 2 for kind in codec.kinds]
    tagged = len(claims) > len(set(claims))
    by_kind = {kind: codec for codec in reversed(members) for kind in codec.kinds}  # int goes to int before float
    by_kind |= {NONE_TYPE: by_name["None"]} if "None" in by_name else {}

    def write(value: object) -> object:
        errors = []
        for codec in members:
            try:
                plain = codec.encode(value)
                return {"@type": codec.name, "@value": plain} if tagged and plain is not None else plain
            except _Mismatch as error:
                errors.append(error)
        raise max(errors, key=lambda error: len(error.steps))

    def read(plain: object) -> object:
        if tagged and isinstance(plain, dict):
            return by_name[plain["@type"]].decode(plain["@value"])
        return by_kind[type(plain)].decode(plain)

    kinds = {dict, *by_kind} & {dict, NONE_TYPE} if tagged else {*by_kind}
    same = {cls for codec in members for cls in codec.same if not tagged}
    return replace(_codec(" | ".join(by_name), kinds, set(), write, read, lambda value: True), same=same)


def is_record(cls: type) -> bool:
    """Whether it is a class with fields: a dataclass, a ``NamedTuple`` with types or a ``TypedDict``."""
    named_tuple = hasattr(cls, "_field_defaults") and bool(cls.__annotations__)
    return named_tuple or is_dataclass(cls) or typing.is_typeddict(cls)


def _record(cls: type, memo: dict[object, _Codec]) -> _Codec:
    hints, optional = _fields_of(cls)
    codecs: dict[str, _Codec] = {}

    def convert(verb: str, given: dict[str, object]) -> dict[str, object]:
        if given.keys() != codecs.keys():
            for name in given.keys() - codecs.keys():
                raise ValueError(f"there is no field {name!r}.{near_match(name, codecs)}")
            for name in codecs.keys() - given.keys() - optional:
                raise ValueError(f"field {name!r} is missing")
        return _convert_each(verb, ((name, codecs[name], value) for name, value in given.items()))

    def write(value: object) -> dict[str, object]:
        if isinstance(value, dict):
            return convert("encode", value)
        return _convert_each("encode", ((name, codec, getattr(value, name)) for name, codec in codecs.items()))

    exact = {dict if typing.is_typeddict(cls) else cls}
    memo[cls] = _codec(short_name(cls), {dict}, exact, write, lambda plain: cls(**convert("decode", plain)))
    for name, hint in hints.items():  # after memo[cls] is set: a field may refer to its own class
        try:
            codecs[name] = _build(hint, memo)
        except PayloadError as error:
            raise PayloadError(error.reason, path=error.path or f"{cls.__qualname__}.{name}") from error
    return memo[cls]


def _fields_of(cls: type) -> tuple[dict[str, object], Set[str]]:
    try:
        hints = typing.get_type_hints(cls, localns={cls.__name__: cls})
        marks = typing.get_type_hints(cls, localns={cls.__name__: cls}, include_extras=True)
    except NameError as error:
        raise PayloadError(f"{error}. Import it at run time, not under TYPE_CHECKING", path=cls.__qualname__) from error
    if typing.is_typeddict(cls):  # __required_keys__ ignores the marks if annotations are postponed
        marked = {mark: {n for n in marks if typing.get_origin(marks[n]) is mark} for mark in (NotRequired, Required)}
        return hints, (hints.keys() - getattr(cls, "__required_keys__", set()) - marked[Required]) | marked[NotRequired]
    if not is_dataclass(cls):
        return hints, getattr(cls, "_field_defaults", {}).keys()
    given = {field.name: field for field in fields(cls) if field.init}
    optional = {n for n, field in given.items() if field.default is not MISSING or field.default_factory is not MISSING}
    return {n: hint for n, hint in hints.items() if n in given or isinstance(hint, InitVar)}, optional


def is_model(cls: object) -> TypeGuard[typing.Any]:
    """Whether it is a class of pydantic, whose models exist only where it is imported."""
    return isinstance(cls, type) and issubclass(cls, getattr(sys.modules.get("pydantic"), "BaseModel", ()))


# -- the classes that processors take ----------------------------------------------------------------------------------

expected: dict[str, dict[str, type]] = {}  # by queue with processors in this process, by type name; the registry's


def refuse_namesake(queue: str, name: str, cls: type) -> None:
    """Refuse an object that the queue's processor would decode as another class of the same name."""
    known = expected.get(queue)
    if not known or known.get(name) is cls:
        return
    short, path = short_name(cls), dotted(cls)
    rivals = [known[name]] if name in known else known.values()
    for theirs in [dotted(one) for one in rivals if short_name(one) == short]:
        if theirs != path:  # else its module was imported again
            raise PayloadError(
                f"it is a {path}, and the processor of queue {queue!r} takes a {theirs}, another class of that name. "
                f"Enqueue a {theirs}, or register a processor for {path}. Classes with a payload_type of their own "
                "need two different ones"
            )
