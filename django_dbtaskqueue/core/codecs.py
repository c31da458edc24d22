"""Typed payloads: what a caller enqueues as a dataclass reaches the processor as the same class with the same values.

The JSON stays readable: objects by field name, dates and durations as ISO 8601, Decimal and UUID as text, bytes as
base64, enum members by value when all are str or all int, else by name, members of a union that JSON would confuse as
``{"@type": "date", "@value": "2013-01-31"}``. Fields with ``init=False`` are left to the constructor. A PayloadError
names the path, the expected type and the value, or the class and the field that JSON cannot express.
"""

from __future__ import annotations

import json
import sys
import typing
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import MISSING, InitVar, dataclass, fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import partial
from operator import methodcaller
from typing import Any, NotRequired, Required
from uuid import UUID

from django_dbtaskqueue.core.exceptions import PayloadError, near_match
from django_dbtaskqueue.core.json import path_of, short_repr

NONE = type(None)
JSON_TYPES: Set[type] = frozenset({dict, list, str, int, float, bool, NONE})
Step = Callable[[Any], Any]


class _Mismatch(Exception):
    def __init__(self, expected: str, value: object, why: object = "") -> None:
        self.steps: list[Any] = []  # to the value; added innermost first, while the error travels up
        super().__init__(f"expected {expected}, got {type(value).__name__} {short_repr(value)}{why and f' ({why})'}")


@dataclass(slots=True)
class _Codec:
    name: str
    kinds: Set[type]  # what the encoded form is in JSON; a union tells its members apart by it
    encode: Step
    decode: Step
    rank: int = 0  # the higher, the later a union asks: str, int and float take subclasses and neighbours too


def type_name(cls: type) -> str:
    """Return the registered name of a payload class: ``payload_type`` when that is a str, else the qualified name."""
    name = getattr(cls, "payload_type", None)
    return name if isinstance(name, str) else cls.__qualname__


def encode(value: object, declared: Any = None) -> tuple[str | None, object]:
    """Return (type name, or None for plain JSON; JSON-ready value). What has no class is encoded as ``declared``."""
    cls = type(value)
    if cls not in JSON_TYPES and (_is_record(cls) or issubclass(cls, _model_base())):
        return type_name(cls), _run(prepare(cls).encode, value)
    return None, _run(prepare(declared).encode, value)


def decode(cls: Any, plain: object) -> Any:
    """Return ``plain`` as a ``cls``, unchanged for None, Any and dict. Unknown and missing fields are errors."""
    return _run(prepare(cls).decode, plain, cannot="be read")


def prepare(cls: Any) -> _Codec:
    """Make the plan for a payload class and keep it; an annotation that has no JSON form is an error now."""
    hint = Any if cls is None or cls is dict or cls is object else cls
    if (codec := _plans.get(hint)) is None:
        memo = dict(_plans)  # made visible only when all that the plans refer to is complete
        codec = _build(hint, memo)
        _plans.update(memo)
    return codec


def _run(step: Step, value: object, *, cannot: str = "be stored") -> Any:
    try:
        return step(value)
    except _Mismatch as error:
        raise PayloadError(str(error), path=path_of(error.steps[::-1]), cannot=cannot) from error
    except RecursionError as error:
        raise PayloadError("it is nested too deep, or contains itself", cannot=cannot) from error


def _codec(name: str, kinds: Set[type], fits: Step, write: Step, read: Step, *, rank: int = 0) -> _Codec:
    def guarded(test: Step, step: Step) -> Step:
        def run(value: Any) -> Any:
            try:
                if test(value):
                    return step(value)
            except (_Mismatch, RecursionError):
                raise
            except Exception as error:  # whatever a constructor or a parser objects to
                raise _Mismatch(name, value, error) from error
            raise _Mismatch(name, value)

        return run

    return _Codec(name, kinds, guarded(fits, write), guarded(lambda plain: type(plain) in kinds, read), rank)


def _leaf(cls: type, kind: type, write: Step, read: Step, *, but: type | tuple[()] = (), rank: int = 0) -> _Codec:
    return _codec(cls.__name__, {kind}, lambda v: isinstance(v, cls) and not isinstance(v, but), write, read, rank=rank)


def _same(value: Any) -> Any:
    return value


def _fits_float(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and float(value) == value)


def _write_duration(value: timedelta) -> str:
    micros = value // timedelta(microseconds=1)
    return f"PT{'-' * (micros < 0)}{abs(micros) // 10**6}.{abs(micros) % 10**6:06}S"


def _read_duration(text: str) -> timedelta:
    seconds, _, micros = text[2:-1].partition(".")
    if text[:2] + text[-1:] != "PTS" or len(micros) > 6:
        raise ValueError("durations are ISO 8601 in seconds, e.g. PT90.5S")
    return timedelta(microseconds=int(f"{seconds}{micros:0<6}"))


_ANY = _Codec("any JSON value", JSON_TYPES, _same, _same)
_plans: dict[Any, _Codec] = {
    Any: _ANY,
    str: _leaf(str, str, _same, _same, rank=1),
    int: _leaf(int, int, _same, _same, but=bool, rank=1),
    float: _codec("float", {float, int}, _fits_float, float, float, rank=2),
    bool: _leaf(bool, bool, _same, _same),
    NONE: _codec("None", {NONE}, lambda v: v is None, _same, _same, rank=3),
    datetime: _leaf(datetime, str, datetime.isoformat, datetime.fromisoformat),
    date: _leaf(date, str, date.isoformat, date.fromisoformat, but=datetime),
    time: _leaf(time, str, time.isoformat, time.fromisoformat),
    timedelta: _leaf(timedelta, str, _write_duration, _read_duration),
    Decimal: _leaf(Decimal, str, str, Decimal),
    UUID: _leaf(UUID, str, str, UUID),
    bytes: _leaf(bytes, str, lambda value: b64encode(value).decode(), lambda plain: b64decode(plain, validate=True)),
}
_ARRAYS: dict[Any, type] = {list: list, Sequence: list, set: set, Set: set, frozenset: frozenset, tuple: tuple}


def _build(hint: Any, memo: dict[Any, _Codec]) -> _Codec:
    return memo[hint] if hint in memo else memo.setdefault(hint, _make(hint, memo))


def _make(hint: Any, memo: dict[Any, _Codec]) -> _Codec:
    origin, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    if target := getattr(hint, "__supertype__", None) or getattr(hint, "__value__", None):  # NewType, type X = ...
        return _build(target, memo)
    if origin in {typing.Union, type(int | str)}:
        return _union([_build(arg, memo) for arg in args])
    if origin is typing.Literal:
        return _choice(str(hint), [(arg, _build(type(arg), memo).encode(arg)) for arg in args])
    if origin in {dict, Mapping}:
        return _dict(*(_build(arg, memo) for arg in args or (str, Any)))
    if origin in _ARRAYS:
        items = [_build(arg, memo) for arg in args or (Any, ...) if arg is not ...]
        return _array(_ARRAYS[origin], items, fixed=origin is tuple and bool(args) and args[-1] is not ...)
    if isinstance(hint, type) and issubclass(hint, Enum):
        by_value = {type(member.value) for member in hint} in ({str}, {int})
        return _choice(hint.__qualname__, [(member, member.value if by_value else member.name) for member in hint])
    if isinstance(hint, type) and issubclass(hint, _model_base()):
        write = methodcaller("model_dump", mode="json", round_trip=True, warnings="error")
        read = partial(origin.model_validate_json, by_name=True, by_alias=True)
        return _codec(type_name(hint), JSON_TYPES, lambda v: type(v) is hint, write, lambda p: read(json.dumps(p)))
    if isinstance(hint, type) and _is_record(hint):
        return _record(hint, memo)
    raise PayloadError(
        f"{hint!r} has no JSON form. Use a dataclass, standard container, number, date, str, Enum or Any"
    )


def _choice(name: str, pairs: list[tuple[Any, Any]]) -> _Codec:
    written = {(type(value), value): plain for value, plain in pairs}
    known = {(type(plain), plain): value for value, plain in pairs}
    write, read = lambda v: written[type(v), v], lambda p: known[type(p), p]
    return _codec(name, {kind for kind, _ in known}, lambda v: True, write, read)


def _walk(items: Iterable[tuple[Any, Step, Any]]) -> dict[Any, Any]:
    done, key = dict[Any, Any](), None
    try:
        for key, step, value in items:
            done[key] = step(value)
    except _Mismatch as error:
        error.steps.append(key)
        raise
    return done


def _array(cls: Callable[[Any], Any], items: list[_Codec], *, fixed: bool) -> _Codec:
    def walk(verb: str, values: Any) -> Any:
        if fixed and len(values) != len(items):
            raise ValueError(f"{len(items)} items are expected, and there are {len(values)}")
        steps = [getattr(item, verb) for item in items] * (1 if fixed else len(values))
        return _walk(zip(range(len(values)), steps, values, strict=True)).values()

    write, read = lambda v: list(walk("encode", v)), lambda p: cls(walk("decode", p))
    name = f"{cls.__name__}[{', '.join(item.name for item in items)}]"
    return _codec(name, {list}, lambda v: type(v) is cls, write, read)


def _dict(key: _Codec, item: _Codec) -> _Codec:
    as_text = key.kinds <= {str} or key is _ANY  # other keys become the JSON text of their encoded form

    def write(value: dict[Any, Any]) -> dict[str, Any]:
        keys = [key.encode(one) if as_text else json.dumps(key.encode(one)) for one in value]
        return _walk((name, item.encode, one) for name, one in zip(keys, value.values(), strict=True))

    def read(plain: dict[str, Any]) -> dict[Any, Any]:
        values = _walk((name, item.decode, one) for name, one in plain.items()).values()
        return dict(zip((key.decode(one if as_text else json.loads(one)) for one in plain), values, strict=True))

    return _codec(f"dict[{key.name}, {item.name}]", {dict}, lambda v: type(v) is dict, write, read)


def _union(members: list[_Codec]) -> _Codec:
    members.sort(key=lambda codec: codec.rank)
    by_name = {codec.name: codec for codec in members}
    if len(by_name) < len(members):
        raise PayloadError(f"two members of a union have one name, of {[*by_name]}. Give one class a payload_type")
    claims = [kind for codec in members if codec.rank < 2 for kind in codec.kinds]
    tagged = len(claims) > len(set(claims))
    by_kind = {kind: codec for codec in reversed(members) for kind in codec.kinds}  # int goes to int before float
    by_kind |= {NONE: by_name["None"]} if "None" in by_name else {}

    def write(value: Any) -> Any:
        errors = []
        for codec in members:
            try:
                plain = codec.encode(value)
                return {"@type": codec.name, "@value": plain} if tagged and plain is not None else plain
            except _Mismatch as error:
                errors.append(error)
        raise max(errors, key=lambda error: len(error.steps))

    def read(plain: Any) -> Any:
        if tagged and plain is not None:
            return by_name[plain["@type"]].decode(plain["@value"])
        return by_kind[type(plain)].decode(plain)

    kinds = {dict, *by_kind} & {dict, NONE} if tagged else {*by_kind}
    return _codec(" | ".join(by_name), kinds, lambda v: True, write, read)


def _is_record(cls: Any) -> bool:
    named_tuple = hasattr(cls, "_field_defaults") and bool(cls.__annotations__)
    return named_tuple or is_dataclass(cls) or typing.is_typeddict(cls)


def _record(cls: Any, memo: dict[Any, _Codec]) -> _Codec:
    hints, optional = _fields_of(cls)
    codecs: dict[str, _Codec] = {}

    def walk(verb: str, given: dict[str, Any]) -> dict[str, Any]:
        for name in given.keys() - codecs.keys():
            raise ValueError(f"there is no field {name!r}.{near_match(name, codecs)}")
        for name in codecs.keys() - given.keys() - optional:
            raise ValueError(f"field {name!r} is missing")
        return _walk((name, getattr(codecs[name], verb), value) for name, value in given.items())

    def write(value: Any) -> dict[str, Any]:
        return walk("encode", value if isinstance(value, dict) else {name: getattr(value, name) for name in codecs})

    def read(plain: dict[str, Any]) -> Any:
        return cls(**walk("decode", plain))

    wanted = dict if typing.is_typeddict(cls) else cls
    memo[cls] = _codec(type_name(cls), {dict}, lambda v: type(v) is wanted, write, read)  # its fields may refer to it
    for name, hint in hints.items():
        try:
            codecs[name] = _build(hint, memo)
        except PayloadError as error:
            raise PayloadError(error.reason, path=error.path or f"{cls.__qualname__}.{name}") from error
    return memo[cls]


def _fields_of(cls: Any) -> tuple[dict[str, Any], Set[str]]:
    try:
        hints = typing.get_type_hints(cls, localns={cls.__name__: cls})
        marks = typing.get_type_hints(cls, localns={cls.__name__: cls}, include_extras=True)
    except NameError as error:
        raise PayloadError(f"{error}. Import it at run time, not under TYPE_CHECKING", path=cls.__qualname__) from error
    if typing.is_typeddict(cls):  # with postponed annotations __required_keys__ does not know of the marks
        marked = {mark: {n for n in marks if typing.get_origin(marks[n]) is mark} for mark in (NotRequired, Required)}
        return hints, (hints.keys() - cls.__required_keys__ - marked[Required]) | marked[NotRequired]
    if not is_dataclass(cls):
        return hints, cls._field_defaults.keys()
    given = {field.name: field for field in fields(cls) if field.init}
    optional = {n for n, field in given.items() if field.default is not MISSING or field.default_factory is not MISSING}
    return {n: hint for n, hint in hints.items() if n in given or isinstance(hint, InitVar)}, optional


def _model_base() -> Any:
    return getattr(sys.modules.get("pydantic"), "BaseModel", ())  # nobody has a model before pydantic is imported
