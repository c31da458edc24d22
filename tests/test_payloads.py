"""Many payloads at once: the same texts as one by one, or none at all."""

from __future__ import annotations

import json
import math
from enum import StrEnum
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_dbtaskqueue.core.exceptions import PayloadError
from django_dbtaskqueue.core.json import Limits, dumps, dumps_many, text_array

ODD = ["\0", "\ud800", math.nan, math.inf, 1e16, 2**70, (1,), UUID(int=1), {1: 2}, "1e16", '\\"e1', b"x"]
odd = st.sampled_from(ODD)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | odd,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def one_by_one(many: list[Any], limits: Limits) -> list[bytes] | None:
    try:
        return [dumps(value, limits=limits).encode() for value in many]
    except PayloadError:
        return None


@given(st.lists(values, max_size=5), st.sampled_from([Limits(), Limits(depth=2, size=30)]))
def test_what_is_written_together_is_what_is_written_one_by_one(many: list[Any], limits: Limits) -> None:
    together = dumps_many(many, limits=limits)
    assert together is None or together == one_by_one(many, limits)


PLAIN = [None, True, 0, -1.5, "", "é\U0001f600", [], {}, {"a": [1, {"b": None}]}, "file1.txt e10", {"1e5": "a\\e1"}]


def test_plain_values_need_no_closer_look() -> None:
    assert dumps_many(PLAIN) == [dumps(value).encode() for value in PLAIN]
    assert dumps_many([]) == []


class Colour(StrEnum):
    RED = "red"


def test_a_subclass_of_text_is_written_as_text() -> None:
    assert dumps_many([Colour.RED]) == [b'"red"']


def test_one_that_is_refused_is_enough() -> None:
    limits, deep = Limits(depth=10, size=100), json.loads("[" * 11 + "]" * 11)
    bad_ones: list[Any] = ["\0", "\ud800", math.nan, {1: 2}, {"a": {1, 2}}, object(), "x" * 200, deep]
    for bad in bad_ones:
        assert dumps_many([1, bad, 2], limits=limits) is None
        with pytest.raises(PayloadError):
            dumps(bad, limits=limits)


def test_limits_are_those_of_each_value() -> None:
    limits = Limits(depth=3, size=40)
    fine: list[Any] = ["x" * 38, [[[]]], {"a": {"b": {}}}] * 20
    assert dumps_many(fine, limits=limits) == one_by_one(fine, limits)


def test_texts_become_an_array() -> None:
    texts = ["a", None, 'é"\\\n']
    assert json.loads(text_array(texts)) == texts
