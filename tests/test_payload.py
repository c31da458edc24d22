"""JSON in and out of a row: the same value comes back, or PayloadError names the place."""

import base64
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import json
import math
import re
import sys
import uuid
from functools import reduce
from itertools import product
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from django_dbtaskqueue.core import json as payload
from django_dbtaskqueue.core.exceptions import PayloadError
from django_dbtaskqueue.core.json import DEFAULT_LIMITS, Limits
from tests.support import Unprintable
from tests.test_codecs import refusal, typed

Colour = enum.StrEnum("Colour", {"RED": "red"})
Level = enum.IntEnum("Level", {"HIGH": 2})
Shade = enum.Enum("Shade", {"DARK": "dark"})
Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Claim:
    id: int


class Ratio(float):
    pass


@pytest.fixture(params=["orjson", "stdlib"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test with the ``speed`` extra and as if it were not installed."""
    if request.param == "orjson":
        pytest.importorskip("orjson")
    else:
        monkeypatch.setattr(payload, "orjson", None)
    return str(request.param)


def nested(depth: int) -> list[Any]:
    return reduce(lambda inner, _: [inner], range(depth - 1), [])


def test_round_trip_keeps_value_and_types(reader: str) -> None:
    for value in [
        *(None, True, 0, -1, 1.5, -0.0, 1e-7, 5e-324, 10**40, 10**4299),
        *(2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1),
        *("", "é€😀", "\x01\x7f\u2028\ufeff", "\\u0000 as six characters", 'quotes " and \\ and e+16', "1e+16"),
        *("6e1f0f0e-3e5f-4a3b", [], {}, {"": None}, {"id": 123, "carrier": "UA", "delay": 1.5}),
        {"items": [{"when": "2013-01-01", "n": [1, [2, {}]]}] * 60},
        [{"a": [True, False, None]}, 1.0, 1],
    ]:
        text = payload.dumps(value)
        for read in (payload.loads(text), payload.loads(text.encode()), json.loads(text)):
            assert typed(read) == typed(value)


@given(st.floats(allow_nan=False, allow_infinity=False))
@example(1e16)
@example(-1e16)
@example(1.2345678901234568e17)
@example(sys.float_info.max)
@example(-1e-300)
def test_a_float_is_written_so_that_jsonb_cannot_make_it_an_integer(number: float) -> None:
    for orjson in {payload.orjson, None}:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(payload, "orjson", orjson)
            wrapped = [number, {"a": [number, "1e+16", 'b" 1e+16']}]
            text = payload.dumps(wrapped)
            digits = json.loads(text, parse_float=str)  # what stands outside strings
            for written in (digits[0], digits[1]["a"][0]):
                assert "e+" not in written and ("." in written or "e-" in written)
            assert typed(payload.loads(text)) == typed(wrapped)


def test_subclasses_and_tuples_are_written_as_their_json_base(reader: str) -> None:
    value = [(1, (2,)), Point(1, 2), Colour.RED, {Colour.RED: Level.HIGH}, [Ratio(0.5)], {"a": "é", "b": [1, 2]}]
    assert payload.dumps(value) == '[[1,[2]],[1,2],"red",{"red":2},[0.5],{"a":"é","b":[1,2]}]'
    assert payload.dumps(Colour.RED) == '"red"'


def test_depth_counts_containers_up_to_the_limit(reader: str) -> None:
    assert payload.dumps(nested(100)) == "[" * 100 + "]" * 100
    assert payload.dumps({"brackets": "[" * 300}) == '{"brackets":"' + "[" * 300 + '"}'
    assert refusal(payload.dumps, nested(101)).path == "[0]" * 100
    assert payload.dumps(nested(5), limits=Limits(depth=5))
    assert "deeper than 5" in refusal(payload.dumps, nested(6), limits=Limits(depth=5)).reason
    assert "deeper than 100" in refusal(payload.dumps, nested(50_000)).reason


def test_size_counts_bytes_of_utf8_up_to_the_limit(reader: str) -> None:
    limits = Limits(size=12)
    assert payload.dumps("x" * 10, limits=limits) and payload.dumps("é" * 5, limits=limits)
    for text, size in (("x" * 11, 13), ("é" * 6, 14)):
        error = refusal(payload.dumps, text, limits=limits)
        assert (error.path, f"takes {size} bytes as JSON and 12 are allowed" in error.reason) == ("", True)
    assert len(payload.dumps("x" * (DEFAULT_LIMITS.size - 2))) == 1024 * 1024
    assert "1,048,577 bytes" in refusal(payload.dumps, "x" * (DEFAULT_LIMITS.size - 1)).reason
    for wrong in ({"depth": 0}, {"depth": 501}, {"size": 0}):
        with pytest.raises(ValueError, match="depth of 1 to 500"):
            Limits(**wrong)


REFUSED = [
    ("a\0b", "NUL character U+0000 at index 1"),
    ("\ud800", "lone surrogate U+D800 at index 0"),
    *((math.nan, "is nan"), (Ratio("nan"), "is nan"), (math.inf, "is inf"), (-math.inf, "is -inf")),
    *((10**4300, "more than 4,300 digits"), (-(10**5000), "more than 4,300 digits")),
    ({1: "a"}, "has the key 1 of type int, and JSON keys are text"),
    ({(1, 2): "a"}, "has the key (1, 2) of type tuple"),
    ({"a\0": 1}, "has the key 'a\\x00', which holds the NUL character"),
    ({"\ud800": 1}, "has the key '\\ud800', which holds the lone surrogate U+D800"),
    (dt.datetime(2013, 1, 1, 5, 17), "of type datetime, which JSON does not have. Use isoformat()"),
    *((dt.timedelta(1), "Use total_seconds()"), (b"abc", "Use base64.b64encode()")),
    (decimal.Decimal("1.5"), "of type Decimal, which JSON does not have. Use str()"),
    (uuid.UUID(int=1), "of type UUID, which JSON does not have. Use str()"),
    ({1, 2}, "of type set, which JSON does not have. Use list()"),
    (Shade.DARK, "of type Shade, which JSON does not have. Use .value"),
    (Claim(1), "Pass the dataclass itself as the whole payload, or use dataclasses.asdict()"),
    *((1j, "of type complex"), (object, "of type type"), (range(3), "of type range")),
    (iter([1]), "of type list_iterator"),
]
WRAPS: list[tuple[Any, str]] = [
    *((lambda v: v, ""), (lambda v: [v], "[0]")),
    (lambda v: {"items": [0, 1, 2, {"when": v}]}, "items[3].when"),
    (lambda v: {"a b": (1, v)}, '["a b"][1]'),
    (lambda v: {"ok": 1, "é": {"1": v}}, '["\\u00e9"]["1"]'),
]


def test_what_no_database_holds_and_a_circle_are_refused_with_their_path(reader: str) -> None:
    for (value, reason), (wrap, path) in product(REFUSED, WRAPS):
        error = refusal(payload.dumps, wrap(value))
        assert (error.path, reason in error.reason) == (path, True), error
        assert payload.find_fault(wrap(value)) == (path, error.reason)
    value: dict[str, Any] = {"name": "x", "children": [{}]}
    value["children"][0]["parent"] = value
    error = refusal(payload.dumps, value)
    assert (error.path, "circular" in error.reason) == ("children[0].parent", True)
    shared = {"a": 1}
    assert payload.dumps([shared, shared]) == '[{"a":1},{"a":1}]'


def test_a_long_integer_is_refused_also_where_this_process_could_read_it(reader: str) -> None:
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        assert "4,300 digits" in refusal(payload.dumps, {"n": 10**4300}).reason
        assert payload.dumps({"n": [10**4299, "x"]})
    finally:
        sys.set_int_max_str_digits(limit)


def test_a_long_value_and_a_broken_repr_do_not_spoil_the_message() -> None:
    assert "<Unprintable whose repr() fails>" in str(refusal(payload.dumps, [Unprintable()]))
    assert len(str(refusal(payload.dumps, {b"x" * 10_000: 1}))) < 300


ODD_TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)  # NUL and lone surrogates too
GOOD_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
GOOD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | GOOD_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(GOOD_TEXT, inner, max_size=4),
    max_leaves=20,
)
SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | ODD_TEXT
ANY_LEAF = SCALARS | st.binary(max_size=3) | st.datetimes() | st.uuids() | st.sampled_from([Shade.DARK, Claim(1)])
ANY_KEY = ODD_TEXT | st.integers(0, 3) | st.none() | st.booleans()
ANYTHING = st.recursive(
    ANY_LEAF, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_KEY, inner, max_size=3), max_leaves=12
)


def follow(value: Any, path: str) -> Any:
    """Walk ``path`` as a person would read it."""
    rest = path if path[:1] in {"", "["} else f".{path}"
    while rest:
        if rest[0] == ".":
            step = re.split(r"[.\[]", rest[1:])[0]
            rest = rest[1 + len(step) :]
        else:
            step, end = json.JSONDecoder().raw_decode(rest, 1)
            rest = rest[end + 1 :]
        value = value[step]
    return value


def is_culprit(value: Any) -> bool:
    """Return whether ``value`` alone, without what it contains, cannot be stored."""
    if isinstance(value, dict):
        return any(not isinstance(key, str) or payload.clean_text(key) != key for key in value)
    if isinstance(value, list):
        return False
    if isinstance(value, str):
        return payload.clean_text(value) != value
    if isinstance(value, float):
        return not math.isfinite(value)
    return not (value is None or (isinstance(value, int) and abs(value) < 10**4300))


@given(ANYTHING | GOOD, st.sampled_from(["orjson", "stdlib"]))
def test_any_value_round_trips_or_is_refused_at_the_culprit(value: Any, how: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if how == "stdlib":
            patch.setattr(payload, "orjson", None)
        try:
            text = payload.dumps(value)
        except PayloadError as error:
            assert is_culprit(follow(value, error.path)), error
        else:
            assert payload.find_fault(value) is None and typed(payload.loads(text)) == typed(value)
            text.encode()
            assert "\\u0000" not in text.replace("\\\\", "")


def test_what_is_not_json_is_a_payload_error(reader: str) -> None:
    for text in [
        *("", "{", "nul", "NaN", "[Infinity]", "-Infinity", "1e400", "1 2", "[" * 200_000),
        *('"\\ud800"', '["\\uDFFF"]', b"\xff", '"\ud800"'),
    ]:
        assert "not JSON" in str(refusal(payload.loads, text))


@given(ODD_TEXT, st.integers(0, 40))
@example("é€😀" * 3, 9)
@example("a\0b", 2)
@example("\ud83d", 3)
@example("x\udc00y", 4)
@example("😀" * 2000, 4000)
def test_cutting_keeps_whole_characters_within_the_limit(text: str, limit: int) -> None:
    clean = payload.clean_text(text)
    head, tail = payload.cut_bytes(text, limit), payload.tail_bytes(text, limit)
    assert clean.startswith(head) and clean.endswith(tail)
    for part, one_more in ((head, clean[: len(head) + 1]), (tail, clean[-len(tail) - 1 :])):
        assert len(part.encode()) <= limit
        assert part == clean or len(one_more.encode()) > limit


@given(ODD_TEXT)
def test_clean_text_is_accepted_and_keeps_what_was_clean(text: str) -> None:
    clean = payload.clean_text(text)
    assert len(clean) == len(text)
    assert payload.loads(payload.dumps(clean)) == clean
    assert all(new in (old, "\ufffd") for old, new in zip(text, clean, strict=True))


def test_what_is_kept_of_a_result_says_whose_value_it_is() -> None:
    loop: list[Any] = []
    loop.append(loop)
    for wrong in (Unprintable(), loop, "x" * 2_000_000, base64.b64encode(b"x")):
        assert str(refusal(payload.kept, "The result", wrong)).startswith("The result cannot be stored: ")
    assert payload.kept("The result", {"ok": 1}) == '{"ok":1}' and payload.kept("The result", None) is None


ODD = st.sampled_from(
    ["\0", "\ud800", math.nan, math.inf, 1e16, 2**70, (1,), uuid.UUID(int=1), {1: 2}, "1e16", '\\"e1', b"x"]
)
MANY = st.lists(ANYTHING | GOOD | ODD | st.lists(ODD, max_size=3), max_size=5)


def one_by_one(many: list[Any], limits: Limits) -> list[bytes] | None:
    try:
        return [payload.dumps(value, limits=limits).encode() for value in many]
    except PayloadError:
        return None


@given(MANY, st.sampled_from([Limits(), Limits(depth=2, size=30)]))
def test_what_is_written_together_is_what_is_written_one_by_one(many: list[Any], limits: Limits) -> None:
    together = payload.dumps_many(many, limits=limits)
    assert together is None or together == one_by_one(many, limits)


def test_plain_values_subclasses_of_text_and_what_is_just_within_the_limits_need_no_closer_look() -> None:
    plain = [None, True, 0, -1.5, "", "é\U0001f600", [], {}, {"a": [1, {"b": None}]}, "file1.txt e10", {"1e5": "a\\e1"}]
    largest: list[Any] = ["x" * 38, [[[]]], {"a": {"b": {}}}] * 20
    for values, limits in ((plain, Limits()), ([], Limits()), ([Colour.RED], Limits()), (largest, Limits(3, 40))):
        assert payload.dumps_many(values, limits=limits) == one_by_one(values, limits)
