"""The protocol keeps every promise in each state that it can reach, and needs each of its precautions."""

import pytest

from django_dbtaskqueue.core.states import BY_VERB
from tests.model.cases import LARGE, MODELLED, NOT_MODELLED, SMALL, VARIANTS
from tests.model.protocol import Protocol, Size
from tests.model.search import search


@pytest.mark.slow
@pytest.mark.parametrize("size", [pytest.param(size, id=name) for name, size in (SMALL | LARGE).items()])
def test_every_promise_holds_in_every_state(size: Size) -> None:
    found = search(Protocol(size))
    print(found)
    assert found.broken == "", str(found)
    assert found.states > 100_000


@pytest.mark.parametrize("name", VARIANTS)
def test_without_a_precaution_a_promise_breaks(name: str) -> None:
    """``pytest tests/model -rP`` prints the steps to it."""
    variant = VARIANTS[name]
    found = search(Protocol(variant.size, name), variant.breaks)
    print(f"{name}: {variant.says}\n{found}")
    assert (found.broken, len(found.way) > 0) == (variant.breaks, True)


def test_each_way_between_statuses_is_modelled_or_named_as_not_modelled() -> None:
    assert BY_VERB.keys() == MODELLED | NOT_MODELLED and not MODELLED & NOT_MODELLED
