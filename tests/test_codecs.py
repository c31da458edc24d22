"""Typed payloads come back as the same class with the same values, through the JSON of a row."""

from __future__ import annotations

import datetime as dt
import enum
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, make_dataclass
from decimal import Decimal
from typing import Any, ClassVar, Literal, NamedTuple, NewType, Optional, TypedDict, Union
from uuid import UUID
from zoneinfo import ZoneInfo

import pandas as pd
import pydantic
import pytest
from hypothesis import given, strategies as st

from django_dbtaskqueue.core import codecs, json
from django_dbtaskqueue.core.exceptions import PayloadError

UserId = NewType("UserId", int)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mixed(enum.Enum):
    ONE = 1
    PAIR = (1, 2)


class Point(NamedTuple):
    x: int
    y: float = 0.0


class Extra(TypedDict):
    seat: str
    bags: typing.NotRequired[int]


class Loose(TypedDict, total=False):
    note: str
    code: typing.Required[int]


@dataclass(frozen=True, slots=True)
class Airport:
    code: str
    elevation: float | None = None


@dataclass(frozen=True, slots=True)
class Airline:
    code: str


@dataclass
class Node:
    name: str
    children: list[Node] = field(default_factory=list)
    parent: Optional[Airport] = None  # noqa: UP045  # the old spelling must work as well


@dataclass(kw_only=True)
class Claim:
    kind: ClassVar[str] = "claim"
    id: UserId = UserId(7)
    carrier: str = "UA"
    delay: float = 1.5
    late: bool = True
    flown: dt.date = dt.date(2013, 1, 31)
    filed: dt.datetime = dt.datetime(2013, 2, 1, 5, 17, 0, 123456, dt.timezone(-dt.timedelta(hours=5)))
    departs: dt.time = dt.time(5, 17)
    grace: dt.timedelta = dt.timedelta(days=-1, microseconds=1)
    amount: Decimal = Decimal("250.00")
    key: UUID = field(default=UUID(int=1))
    scan: bytes = b"\x00\xff"
    colour: Colour = Colour.RED
    level: Level = Level.HIGH
    mixed: Mixed = Mixed.PAIR
    mode: Literal["a", "b", 1, True, None] = 1
    origin: Airport = Airport("EWR", 5.5)
    target: Airport | Airline = Airline("UA")
    either: Union[int, str, None] = "7"  # noqa: UP007  # the old spelling must work as well
    when: dt.date | dt.datetime | str | None = dt.datetime(2013, 1, 1)
    number: int | float = 1
    legs: list[Airport] = field(default_factory=lambda: [Airport("JFK"), Airport("LGA")])
    stops: tuple[str, ...] = ("a", "b", "c")
    pair: tuple[int, dt.date] = (1, dt.date(2013, 1, 1))
    tags: set[str] = field(default_factory=lambda: {"x", "y"})
    frozen: frozenset[int] = frozenset({1, 2})
    fares: dict[str, Decimal] = field(default_factory=lambda: {"eur": Decimal("1.10")})
    by_day: dict[dt.date, int] = field(default_factory=lambda: {dt.date(2013, 1, 1): 3})
    by_number: dict[int, str] = field(default_factory=lambda: {-1: "x"})
    by_pair: dict[tuple[int, str], bool] = field(default_factory=lambda: {(1, "a"): True})
    point: Point = field(default=Point(1, 2.5))
    extra: Extra = field(default_factory=lambda: {"seat": "7A"})
    anything: Any = field(default_factory=lambda: {"plain": [1, None]})
    names: Sequence[str] = field(default_factory=lambda: ["a"])
    lookup: Mapping[str, int] = field(default_factory=lambda: {"a": 1})
    bare: list = field(default_factory=lambda: [1, "x"])  # type: ignore[type-arg]
    shape: dict = field(default_factory=lambda: {"a": [1]})  # type: ignore[type-arg]
    note: str | None = None
    total: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.total = len(self.legs) + len(self.stops)


def through(cls: Any, value: Any) -> Any:
    name, plain = codecs.encode(value, cls)
    text = json.dumps(plain)
    return codecs.decode(cls if name is None else type(value), json.loads(text))  # a name stands for its class


def refusal(call: Callable[..., object], *arguments: Any, **options: Any) -> PayloadError:
    with pytest.raises(PayloadError) as caught:
        call(*arguments, **options)
    return caught.value


def typed(value: Any) -> Any:
    """Return ``value`` with each scalar paired with its type, so that == compares types too."""
    if isinstance(value, dict):
        return type(value), {(type(key), key): typed(one) for key, one in value.items()}
    if isinstance(value, set | frozenset):
        return type(value), {(type(one), one) for one in value}
    if isinstance(value, list | tuple):
        return type(value), [typed(one) for one in value]
    if hasattr(value, "__dataclass_fields__"):
        return type(value), {name: typed(getattr(value, name)) for name in value.__dataclass_fields__}
    return type(value), value


VARIANTS: list[dict[str, Any]] = [
    {},
    *({"mode": mode} for mode in ("a", "b", 1, True, None)),
    *({"target": target} for target in (Airport("EWR"), Airline("EWR"))),
    *({"either": value} for value in (None, 1, "1")),
    *({"when": value} for value in (None, "2013-01-01", dt.date(2013, 1, 1), dt.datetime(2013, 1, 1))),
    *({"number": value} for value in (1, 1.0, 2.5, 10**30)),
    *({"mixed": value} for value in Mixed),
    *({"grace": grace} for grace in (dt.timedelta.min, dt.timedelta.max, dt.timedelta(0), -dt.timedelta(seconds=0.5))),
    *({"extra": {"seat": "1A", "bags": 2}}, {"note": "x"}, {"anything": None}, {"stops": ()}, {"tags": set()}),
]


def test_a_class_comes_back_as_the_same_types_and_values() -> None:
    tree = Node("root", [Node("a", [Node("b")]), Node("c", parent=Airport("EWR"))])
    for value in (*(Claim(**changes) for changes in VARIANTS), tree):
        assert typed(through(type(value), value)) == typed(value)


def test_plain_json_stays_readable() -> None:
    name, plain = codecs.encode(Claim())
    assert name == f"{__name__}.Claim" and not {"kind", "total"} & plain.keys()
    expected = {
        "flown": "2013-01-31", "filed": "2013-02-01T05:17:00.123456-05:00", "grace": "-PT23H59M59.999999S",
        "amount": "250.00", "scan": "AP8=", "colour": "red", "level": 2, "mixed": "PAIR", "either": "7",
        "target": {"@type": "Airline", "@value": {"code": "UA"}}, "pair": [1, "2013-01-01"],
        "by_day": {"2013-01-01": 3}, "by_number": {"-1": "x"}, "by_pair": {'[1, "a"]': True},
        "point": {"x": 1, "y": 2.5},
    }  # fmt: skip
    assert {key: plain[key] for key in expected} == expected


def test_a_missing_field_has_its_default_and_an_integer_is_welcome_as_a_float() -> None:
    assert codecs.decode(Airport, {"code": "EWR"}) == Airport("EWR", None)
    assert codecs.decode(Node, {"name": "x"}) == Node("x", [])
    assert codecs.decode(Point, {"x": 1}) == Point(1, 0.0)
    assert codecs.decode(Loose, {"code": 1}) == {"code": 1}
    assert typed(codecs.decode(Airport, {"code": "EWR", "elevation": 5}).elevation) == (float, 5.0)
    assert typed(through(Point, Point(1, 2))) == typed(Point(1, 2.0))


FLOATS = st.floats(allow_nan=False, allow_infinity=False)
SCALARS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (str, st.text(st.characters(codec="utf-8", exclude_characters="\0"))),
    *((int, st.integers()), (float, FLOATS), (bool, st.booleans()), (bytes, st.binary()), (UUID, st.uuids())),
    *((dt.date, st.dates()), (dt.time, st.times()), (dt.timedelta, st.timedeltas())),
    (dt.datetime, st.datetimes(timezones=st.none() | st.just(dt.UTC))),
    (Decimal, st.decimals(allow_nan=False)),
    *((Colour, st.sampled_from(Colour)), (Mixed, st.sampled_from(Mixed))),
    (Point, st.builds(Point, st.integers(), FLOATS)),
    (Airport, st.builds(Airport, st.text("abc"), st.none() | st.floats(0, 9))),
    (Airline, st.builds(Airline, st.text("abc"))),
    (Literal[1, "1"], st.sampled_from([1, "1"])),
]


@st.composite
def hint_and_value(draw: st.DrawFn, depth: int = 2) -> tuple[Any, st.SearchStrategy[Any]]:
    """Draw a type annotation together with a strategy of its values."""
    if depth == 0 or draw(st.booleans()):
        return draw(st.sampled_from(SCALARS))
    hint, values = draw(hint_and_value(depth - 1))
    other, others = draw(hint_and_value(depth - 1))
    shapes: list[tuple[Any, st.SearchStrategy[Any]]] = [
        (list[hint], st.lists(values, max_size=3)),
        (tuple[hint, ...], st.lists(values, max_size=3).map(tuple)),
        (tuple[hint, other], st.tuples(values, others)),
        (dict[str, hint], st.dictionaries(st.text("ab"), values, max_size=3)),
        (hint | None, st.none() | values),
        (hint | other, values | others),
    ]
    return draw(st.sampled_from(shapes))


@given(st.data())
def test_any_annotation_and_value_round_trips_or_is_refused_when_planned(data: st.DataObject) -> None:
    hint, values = data.draw(hint_and_value())
    try:
        codecs.build_codec(hint)
    except PayloadError as error:
        assert "two members of a union" in error.reason
        return
    value = data.draw(values)
    assert typed(through(hint, value)) == typed(value)


def test_what_needs_no_class_and_what_a_declared_type_encodes() -> None:
    for value in (None, 1, "x", [1], {"a": 1}, True, 1.5, (1, 2)):
        for cls in (None, Any, dict, object):
            assert codecs.encode(value, cls) == (None, value) and codecs.decode(cls, value) is value

    class Trip(TypedDict):
        day: dt.date

    assert codecs.encode({"day": dt.date(2013, 1, 1)}, Trip) == (None, {"day": "2013-01-01"})
    assert codecs.decode(Trip, {"day": "2013-01-01"}) == {"day": dt.date(2013, 1, 1)}
    assert through(list[Airport], [Airport("EWR")]) == [Airport("EWR")]


def test_registered_names() -> None:
    named = make_dataclass("Named", [("id", int, 0)], namespace={"payload_type": "claims.v2"})

    @dataclass
    class Odd:
        payload_type: int = 3

    assert codecs.type_name(named) == "claims.v2" and codecs.encode(named(1)) == ("claims.v2", {"id": 1})
    assert codecs.type_name(Odd) == f"{__name__}.{Odd.__qualname__}"
    assert codecs.type_name(Claim) == f"{__name__}.Claim"


@dataclass
class Positive:
    n: int

    def __post_init__(self) -> None:
        if self.n < 0:
            raise ValueError("n must not be negative")


UNREADABLE: list[tuple[Any, Any, str, str]] = [
    (list[Positive], [{"n": 1}, {"n": -1}], "[1]", "n must not be negative"),
    *((Airport, [], "", "expected Airport, got list []"), (Airport, {}, "", "field 'code' is missing")),
    (Airport, {"code": "x", "elevaton": 1}, "", "there is no field 'elevaton'. Did you mean 'elevation'?"),
    (Airport, {"code": 1}, "code", "expected str, got int 1"),
    (Airport, {"code": "x", "elevation": True}, "elevation", "expected float | None, got bool True"),
    (Airport, {"code": "x", "elevation": 10**400}, "elevation", "expected float, got int"),
    (Node, {"name": "x", "children": [{"name": "y"}, 3]}, "children[1]", "expected Node, got int 3"),
    (Node, {"name": "x", "parent": {"code": None}}, "parent.code", "expected str, got NoneType None"),
    (dt.datetime, "yesterday", "", "expected datetime, got str 'yesterday' (Invalid isoformat"),
    (dt.timedelta, "90", "", "a duration is ISO 8601 text, such as PT1M30.5S"),
    (bytes, "a*b=", "", "expected bytes, got str 'a*b='"),
    (Colour, "green", "", "expected Colour, got str 'green'"),
    *((Level, True, "", "expected Level, got bool True"), (Literal["a", 1], True, "", "got bool True")),
    *((int, True, "", "expected int, got bool True"), (int, 1.0, "", "expected int, got float 1.0")),
    (tuple[int, str], [1], "", "2 items are expected, and there are 1"),
    (dict[str, int], {"a b": "x"}, '["a b"]', "expected int, got str 'x'"),
    (dict[int, str], {"one": "x"}, "", "expected dict[int, str]"),
    (Airport | Airline, {"@type": "Ship", "@value": {}}, "", "expected Airport | Airline"),
    (int | str, [1], "", "expected int | str, got list"),
    (Extra, {"bags": 1}, "", "field 'seat' is missing"),
    (Point, [1, 2], "", "expected Point, got list"),
]


Heliport = make_dataclass("Heliport", [("pads", int, 1)], bases=(Airport,), frozen=True)
UNWRITABLE: list[tuple[dict[str, Any], str, str]] = [
    ({"origin": Heliport("x")}, "origin", "expected Airport, got"),  # it would come back as the base
    *(({"id": "7"}, "id", "expected int, got str '7'"), ({"id": True}, "id", "expected int, got bool True")),
    ({"flown": dt.datetime(2013, 1, 1)}, "flown", "expected date, got datetime"),
    ({"filed": dt.date(2013, 1, 1)}, "filed", "expected datetime, got date"),
    ({"delay": 2**53 + 1}, "delay", "expected float, got int 9007199254740993"),
    ({"legs": [Airport("x"), None]}, "legs[1]", "expected Airport, got NoneType None"),
    ({"legs": [Airport("x", "high")]}, "legs[0].elevation", "expected float, got str 'high'"),
    ({"stops": ["a"]}, "stops", "expected tuple[str], got list"),
    *(({"extra": {}}, "extra", "field 'seat' is missing"), ({"mode": "c"}, "mode", "got str 'c'")),
    ({"fares": {"eur": 1.1}}, "fares.eur", "expected Decimal, got float 1.1"),
    ({"by_number": {"x": "y"}}, "by_number", "expected int, got str 'x'"),
]


def test_decoding_and_encoding_name_path_expectation_and_value() -> None:
    for cls, plain, path, reason in UNREADABLE:
        error = refusal(codecs.decode, cls, plain)
        assert (error.path, reason in error.reason, len(error.reason) < 400) == (path, True, True), error
    for changes, path, reason in UNWRITABLE:
        error = refusal(codecs.encode, Claim(**changes))
        assert (error.path, reason in error.reason) == (path, True), error
    node = Node("x")
    node.children.append(node)
    assert "contains itself" in refusal(codecs.encode, node).reason
    _, plain = codecs.encode({1: "one"}, dict[Any, str])
    assert "has the key 1 of type int" in str(refusal(json.dumps, plain))
    assert str(refusal(codecs.decode, int, "five")).startswith("Payload cannot be read: ")


Inner = make_dataclass("Inner", [("z", complex)])
Outer = make_dataclass("Outer", [("ok", int), ("inner", list[Inner])])
Seeded = make_dataclass("Seeded", [("seed", InitVar[int])])
Twin, OtherTwin = (make_dataclass("Twin", (), namespace={"payload_type": "twin"}) for _ in range(2))
Twins = make_dataclass("Twins", [("twin", Twin | OtherTwin)])


@dataclass
class Half:
    other: list[Other]
    bad: complex


@dataclass
class Other:
    half: Half | None


@dataclass
class Hidden:
    x: NotImported  # type: ignore[name-defined]  # noqa: F821  # what a TYPE_CHECKING import looks like


UNPLANNED: list[tuple[Any, str, str]] = [
    (Inner, "Inner.z", "<class 'complex'> has no JSON form. Use a dataclass"),
    (Outer, "Inner.z", "has no JSON form"),
    (Seeded, "Seeded.seed", "has no JSON form"),
    (Hidden, "Hidden", "name 'NotImported' is not defined. Import it at run time"),
    (Twins, "Twins.twin", "two members of a union"),
    (complex, "", "has no JSON form"),
]


def test_planning_names_class_and_field_and_leaves_no_half_plan_behind() -> None:
    for cls, path, reason in UNPLANNED:
        for _ in range(2):  # a failed plan is not kept
            error = refusal(codecs.build_codec, cls)
            assert (error.path, reason in error.reason) == (path, True), error
    refusal(codecs.build_codec, Half)
    assert refusal(codecs.build_codec, Other).path == "Half.bad"


class Flight(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    number: int = pydantic.Field(alias="flightNumber")
    day: dt.date
    delay: dt.timedelta | None = None
    tags: set[str] = set()

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def label(self) -> str:
        return f"{self.number} on {self.day}"


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)

    when: dt.datetime
    pair: tuple[int, int]


class Codes(pydantic.RootModel[list[int]]):
    pass


@dataclass
class Booking:
    flight: Flight
    codes: Codes | None = None


FLIGHT = Flight(flightNumber=1545, day=dt.date(2013, 1, 1), delay=dt.timedelta(minutes=2), tags={"a"})


def test_pydantic_models_come_back_equal_and_refusals_are_payload_errors() -> None:
    strict = Strict(when=dt.datetime(2013, 1, 1), pair=(1, 2))
    for value in (FLIGHT, strict, Codes([1]), Booking(FLIGHT, Codes([2])), Booking(FLIGHT)):
        name, plain = codecs.encode(value)
        assert name == f"{__name__}.{type(value).__name__}"
        back = codecs.decode(type(value), json.loads(json.dumps(plain)))
        assert (type(back), back) == (type(value), value)
    assert "valid integer" in refusal(codecs.decode, Flight, {"number": "x", "day": "2013-01-01"}).reason
    unchecked = Flight.model_construct(number="x", day=dt.date(2013, 1, 1))
    assert "expected Flight" in refusal(codecs.encode, unchecked).reason
    assert refusal(codecs.decode, Booking, {"flight": {"number": 1}}).path == "flight"


class Login(pydantic.BaseModel):
    password: pydantic.SecretStr = pydantic.SecretStr("")
    note: str = pydantic.Field("", exclude=True)
    legs: list[Route | None] = []
    when: dt.datetime | None = None
    anything: Any = None


class Route(pydantic.BaseModel):
    stops: tuple[str, ...] = ()
    _cache: dict[str, int] = pydantic.PrivateAttr(default_factory=dict)


class Express(Route):
    fare: float = 1.0


@dataclass
class Moment:
    day: dt.datetime | None = None
    length: dt.timedelta = dt.timedelta()
    opens: dt.time = dt.time()


MADRID = ZoneInfo("Europe/Madrid")
REPEATED = dt.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=MADRID)
OTHER_VALUES: list[Any] = [  # each was stored, and came back as another value
    Login(password=pydantic.SecretStr("geheim")),
    Login(note="not sent"),
    Login(legs=[Express(stops=("a",))]),
    Login(anything={1: dt.date(2026, 1, 1)}),
    Moment(pd.NaT),
    Moment(pd.Timestamp("2026-01-01 00:00:00.123456789")),
    Moment(length=pd.Timedelta(1, "ns")),
    Moment(opens=dt.time(12, tzinfo=MADRID)),
]
SAME_VALUES: list[Any] = [
    Login(legs=[Route(stops=("a", "b")), None], when=REPEATED, anything=(1, [2])),
    Moment(pd.Timestamp("2026-10-25 01:30:00.123456Z").tz_convert("Europe/Madrid"), opens=dt.time(12, tzinfo=dt.UTC)),
    Moment(REPEATED),
]


def test_what_would_come_back_as_another_value_is_refused() -> None:
    for value in OTHER_VALUES:
        assert "it would be read back as another value" in refusal(codecs.encode, value).reason, value
    for value in SAME_VALUES:
        codecs.encode(value)
