"""Typed payloads: what a caller enqueues as a dataclass reaches the processor as the same class with the same values.

A class gets its plan once; encoding and decoding walk it and check each value against its annotation, so that a task
that could not be read is refused at enqueue. The JSON stays readable: objects by field name, dates and durations in
ISO 8601, Decimal and UUID as text, bytes as base64, enum members by value when all are text or all integers, else by
name. Members of a union that JSON cannot tell apart become ``{"@type": "date", "@value": "2013-01-31"}``. Fields with
``init=False`` are left to ``__post_init__``.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import sys
import types
import typing
from collections import abc
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, Flag
from itertools import repeat
from typing import Any
from uuid import UUID

from django_dbtaskqueue.exceptions import PayloadError, near_match
from django_dbtaskqueue.payload import path_of, short_repr

JSON_TYPES = frozenset({dict, list, str, int, float, bool, type(None)})


class _Mismatch(Exception):
    """A value that does not fit its annotation. Steps are added, innermost first, while it travels up."""

    def __init__(self, expected: str, value: object, why: object = "") -> None:
        self.steps: list[str | int] = []
        because = f" ({why})" if why else ""
        super().__init__(f"expected {expected}, got {type(value).__name__} {short_repr(value)}{because}")


class _Unsupported(Exception):
    """An annotation that has no JSON form."""


@dataclasses.dataclass(slots=True)
class _Codec:
    name: str
    kinds: abc.Set[type]  # what the encoded form is in JSON; a union tells its members apart by it
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    rank: int = 0  # the higher, the later a union asks: str, int and float take neighbours and subclasses too


Memo = dict[Any, _Codec]


def type_name(cls: type) -> str:
    """Return the registered name of a payload class: ``payload_type`` when that is a str, else the qualified name."""
    name = getattr(cls, "payload_type", None)
    return name if isinstance(name, str) else cls.__qualname__


def prepare(cls: Any) -> None:
    """Make the plan of a payload class. PayloadError names the class and field that has no JSON form."""
    if not _is_plain(cls):
        _plan(cls)


def encode(value: object, declared: Any = None) -> tuple[str | None, object]:
    """Return (type name, plain JSON value); the name is None for what is plain already.

    Dataclasses, NamedTuples and pydantic models are encoded by their own class, anything else as the ``declared`` type
    when one is given. PayloadError names the field whose value does not fit its annotation.
    """
    cls = type(value)
    if cls not in JSON_TYPES and (_is_record(cls) or _is_model(cls)):
        return type_name(cls), _run(_plan(cls).encode, value)
    return None, value if _is_plain(declared) else _run(_plan(declared).encode, value)


def decode(cls: Any, plain: object) -> Any:
    """Return ``plain`` as a ``cls``; unchanged when ``cls`` is None, Any or dict.

    PayloadError names the path, the expected type and the value, an unknown field, a missing one without a default.
    """
    return plain if _is_plain(cls) else _run(_plan(cls).decode, plain)


def _is_plain(cls: Any) -> bool:
    return cls is None or cls is dict or cls is Any or cls is object


def _run(step: Callable[[Any], Any], value: object) -> Any:
    try:
        return step(value)
    except _Mismatch as error:
        raise PayloadError(str(error), path=path_of(error.steps[::-1])) from error
    except RecursionError as error:
        raise PayloadError("it is nested too deep, or contains itself") from error


def _codec(name: str, kinds: set[type], fits: Callable[[Any], bool], write: Any, read: Any, rank: int = 0) -> _Codec:
    def guarded(test: Callable[[Any], bool], step: Callable[[Any], Any]) -> Callable[[Any], Any]:
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


def _is(cls: type, but: type | tuple[()] = ()) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, cls) and not isinstance(value, but)


def _same(value: Any) -> Any:
    return value


_DURATION = re.compile(r"(-?)P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+)(?:\.(\d{1,6}))?S)?)?", re.ASCII)


def _write_duration(value: timedelta) -> str:
    sign, span = ("-", -value) if value < timedelta(0) else ("", value)
    return f"{sign}P{span.days}DT{span.seconds}.{span.microseconds:06}S"


def _read_duration(text: str) -> timedelta:
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ValueError("durations are ISO 8601, e.g. P1DT90.5S")
    days, hours, minutes, seconds = (int(part or 0) for part in found.group(2, 3, 4, 5))
    span = timedelta(days, seconds, int((found[6] or "").ljust(6, "0")), hours=hours, minutes=minutes)
    return -span if found[1] else span


def _fits_float(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and float(value) == value)


_ANY = _Codec("any JSON value", JSON_TYPES, _same, _same)
_STR = _codec("str", {str}, _is(str), _same, _same, 1)
_plans: Memo = {
    Any: _ANY,
    object: _ANY,
    str: _STR,
    int: _codec("int", {int}, _is(int, but=bool), _same, _same, 1),
    float: _codec("float", {float, int}, _fits_float, float, float, 2),
    bool: _codec("bool", {bool}, _is(bool), _same, _same),
    type(None): _codec("None", {type(None)}, _is(type(None)), _same, _same),
    datetime: _codec("datetime", {str}, _is(datetime), datetime.isoformat, datetime.fromisoformat),
    date: _codec("date", {str}, _is(date, but=datetime), date.isoformat, date.fromisoformat),
    time: _codec("time", {str}, _is(time), time.isoformat, time.fromisoformat),
    timedelta: _codec("timedelta", {str}, _is(timedelta), _write_duration, _read_duration),
    Decimal: _codec("Decimal", {str}, _is(Decimal), str, Decimal),
    UUID: _codec("UUID", {str}, _is(UUID), str, UUID),
    bytes: _codec("bytes", {str}, _is(bytes), lambda v: base64.b64encode(v).decode(), base64.b64decode),
}
_ARRAYS = {list: list, abc.Sequence: list, set: set, abc.Set: set, frozenset: frozenset, tuple: tuple}


def _plan(hint: Any) -> _Codec:
    if (codec := _plans.get(hint)) is None:
        memo = dict(_plans)  # made visible only when all that the plans refer to is complete
        try:
            codec = _build(hint, memo)
        except (_Unsupported, RecursionError) as error:
            raise PayloadError(str(error)) from error
        _plans.update(memo)
    return codec


def _build(hint: Any, memo: Memo) -> _Codec:
    if hint not in memo:
        memo[hint] = _make(hint, memo)
    return memo[hint]


def _make(hint: Any, memo: Memo) -> _Codec:
    origin, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    target = getattr(hint, "__supertype__", None) or getattr(hint, "__value__", None)  # NewType, type X = ...
    if target is not None:
        return _build(target, memo)
    if origin in {typing.Union, types.UnionType}:
        return _union([_build(arg, memo) for arg in args])
    if origin is typing.Literal:
        return _choice(str(hint), [(arg, _build(type(arg), memo).encode(arg)) for arg in args])
    if origin in {dict, abc.Mapping}:
        return _dict(*(_build(arg, memo) for arg in args or (str, Any)))
    if origin in _ARRAYS:
        items = [_build(arg, memo) for arg in args or (Any, ...) if arg is not ...]
        return _array(_ARRAYS[origin], items, fixed=origin is tuple and args[-1:] != (...,) and bool(args))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum(hint)
    if isinstance(hint, type) and _is_model(hint):
        return _model(hint)
    if isinstance(hint, type) and (_is_record(hint) or typing.is_typeddict(hint)):
        return _record(hint, memo)
    raise _Unsupported(
        f"{hint!r} has no JSON form. Use a dataclass, a standard container, a date or number type, str, bytes, UUID, "
        "an Enum, or Any for plain JSON"
    )


def _enum(cls: type[Enum]) -> _Codec:
    if issubclass(cls, Flag):
        return _codec(cls.__qualname__, {int}, _is(cls), lambda member: member.value, cls)
    by_value = {type(member.value) for member in cls} in ({str}, {int})
    return _choice(cls.__qualname__, [(member, member.value if by_value else member.name) for member in cls])


def _choice(name: str, pairs: list[tuple[Any, Any]]) -> _Codec:
    written = {(type(value), value): plain for value, plain in pairs}
    known = {(type(plain), plain): value for value, plain in pairs}
    return _codec(
        name,
        {kind for kind, _ in known},
        lambda value: (type(value), value) in written,
        lambda value: written[type(value), value],
        lambda plain: known[type(plain), plain],
    )


def _each(steps: Iterable[Any], calls: Iterable[Callable[[Any], Any]], values: Iterable[Any]) -> list[Any]:
    done, step = [], None
    try:
        for step, call, value in zip(steps, calls, values, strict=False):
            done.append(call(value))
    except _Mismatch as error:
        error.steps.append(step)
        raise
    return done


def _array(cls: type, items: list[_Codec], *, fixed: bool) -> _Codec:
    def walk(verb: str, values: Any) -> list[Any]:
        if fixed and len(values) != len(items):
            raise ValueError(f"{len(items)} items expected, {len(values)} given")
        calls = [getattr(item, verb) for item in items]
        return _each(range(len(values)), calls if fixed else repeat(calls[0]), values)

    name = f"{cls.__name__}[{', '.join(item.name for item in items)}]"
    return _codec(
        name, {list}, lambda v: type(v) is cls, lambda v: walk("encode", v), lambda p: cls(walk("decode", p))
    )


def _dict(key: _Codec, item: _Codec) -> _Codec:
    as_text = key.kinds <= {str} or key is _ANY  # other keys become the JSON text of their encoded form

    def write(value: dict[Any, Any]) -> dict[str, Any]:
        keys = [key.encode(one) if as_text else json.dumps(key.encode(one)) for one in value]
        return dict(zip(keys, _each(keys, repeat(item.encode), value.values()), strict=True))

    def read(plain: dict[str, Any]) -> dict[Any, Any]:
        keys = [key.decode(one if as_text else json.loads(one)) for one in plain]
        return dict(zip(keys, _each(plain, repeat(item.decode), plain.values()), strict=True))

    return _codec(f"dict[{key.name}, {item.name}]", {dict}, lambda v: type(v) is dict, write, read)


def _union(members: list[_Codec]) -> _Codec:
    members.sort(key=lambda codec: codec.rank)
    by_kind: dict[type, _Codec] = {}
    tagged = False
    for codec in members:
        kinds = codec.kinds - by_kind.keys() if codec.name == "float" else codec.kinds
        tagged |= not by_kind.keys().isdisjoint(kinds)
        by_kind |= dict.fromkeys(kinds, codec)
    by_name = {codec.name: codec for codec in members}
    if tagged and len(by_name) < len(members):
        raise _Unsupported(f"a union has two members named {members[0].name}; give one of them a payload_type")

    def write(value: Any) -> Any:
        errors = []
        for codec in members:
            try:
                plain = codec.encode(value)
            except _Mismatch as error:
                errors.append(error)
            else:
                return {"@type": codec.name, "@value": plain} if tagged and value is not None else plain
        raise max(errors, key=lambda error: len(error.steps))

    def read(plain: Any) -> Any:
        if tagged and plain is not None:
            return by_name[plain["@type"]].decode(plain["@value"])
        return by_kind[type(plain)].decode(plain)

    kinds = {dict, type(None)} & {dict, *by_kind} if tagged else set(by_kind)
    return _codec(" | ".join(by_name), kinds, lambda _: True, write, read)


def _is_record(cls: type) -> bool:
    named_tuple = issubclass(cls, tuple) and hasattr(cls, "_fields") and "__annotations__" in vars(cls)
    return named_tuple or dataclasses.is_dataclass(cls)


def _record(cls: Any, memo: Memo) -> _Codec:
    hints, required = _fields_of(cls)
    codecs: dict[str, _Codec] = {}

    def check(given: abc.Set[str]) -> None:
        for name in given - codecs.keys():
            raise ValueError(f"unknown field {name!r}.{near_match(name, codecs)}")
        for name in required - given:
            raise ValueError(f"field {name!r} is missing")

    def write(value: Any) -> dict[str, Any]:
        given = value if isinstance(value, dict) else {name: getattr(value, name) for name in codecs}
        check(given.keys())
        return dict(zip(given, _each(given, [codecs[name].encode for name in given], given.values()), strict=True))

    def read(plain: dict[str, Any]) -> Any:
        check(plain.keys())
        values = _each(plain, [codecs[name].decode for name in plain], plain.values())
        return cls(**dict(zip(plain, values, strict=True)))

    wanted = dict if typing.is_typeddict(cls) else cls
    memo[cls] = _codec(type_name(cls), {dict}, lambda value: type(value) is wanted, write, read)  # may refer to itself
    for name, hint in hints.items():
        try:
            codecs[name] = _build(hint, memo)
        except _Unsupported as error:
            raise PayloadError(str(error), path=f"{cls.__qualname__}.{name}") from error
    return memo[cls]


def _fields_of(cls: Any) -> tuple[dict[str, Any], set[str]]:
    """Return the annotations of the fields that the constructor takes, and the names of those it must be given."""
    try:
        hints = typing.get_type_hints(cls, localns={cls.__name__: cls})
        extras = typing.get_type_hints(cls, localns={cls.__name__: cls}, include_extras=True)
    except NameError as error:
        raise PayloadError(f"{error}. Import it at run time, not under TYPE_CHECKING", path=cls.__qualname__) from error
    ...
