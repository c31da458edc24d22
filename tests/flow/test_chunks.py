"""Items on their way into statements: columns where they are alike, rows where not, and never too much at once."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from django_dbtaskqueue import EnqueueReport, enqueue, enqueue_many, signals
from django_dbtaskqueue.conf.overrides import queue_settings
from django_dbtaskqueue.core import context
from django_dbtaskqueue.core.exceptions import EnqueueError, PayloadError
from django_dbtaskqueue.flow.chunks import Batch, Chunks, UniformRows, options_of
from django_dbtaskqueue.models import Task

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"])


@dataclass
class Letter:
    to: str


@dataclass
class Card:
    to: str


def shares(items: Any) -> list[Batch]:
    chunks = Chunks("parcels", items, queue_settings("parcels", "default"), ["default"], None)
    return [share for one in chunks for share in one.values()]


UNIFORM: list[list[Any]] = [
    [{"reference": "a", "payload": 1}, {"payload": {"b": []}}, {"reference": "c"}, {}],
    [("a", 1), (None, None)],
    [Letter("me"), Letter("you")],
    [("a", Letter("me")), (None, Letter("you"))],
]
NOT_UNIFORM: list[list[Any]] = [
    [("a", 1), {"reference": "b"}],
    [{"reference": "a", "priority": 1}],
    [("a", Letter("me")), ("b", Card("you"))],
]
ODD = [[("a", (1, 2))], [("a", 1e16)]]  # which form they take depends on the JSON writer that is installed


def test_items_of_one_form_become_columns_and_others_rows() -> None:
    for items in UNIFORM:
        [share] = shares(items)
        assert isinstance(share, UniformRows)
        assert len(share) == len(items)
    for items in NOT_UNIFORM:
        assert [type(share) for share in shares(items)] == [list]


@pytest.mark.parametrize("items", [*UNIFORM, *NOT_UNIFORM, *ODD])
def test_either_way_many_is_what_one_is(alias: str, items: list[Any]) -> None:
    with context.bound(trace="t"):
        for item in items:
            options = options_of(0, item)
            enqueue("letters", using=alias, **options)
        enqueue_many("parcels", items, using=alias)
    ours = {"id", "queue", "max_attempts", "create_time", "ready_time", "next_process_time", "last_update_time"}
    columns = [field.name for field in Task._meta.concrete_fields if field.name not in ours]
    one, many = (
        list(Task.objects.using(alias).filter(queue=q).order_by("id").values(*columns)) for q in ("letters", "parcels")
    )
    assert one == many


def test_a_chunk_of_mixed_slices_is_one_statement_in_order(alias: str) -> None:
    items: list[Any] = [(None, number) for number in range(900)]
    items[700] = {"payload": 700, "tag": "gpu"}
    assert enqueue_many("parcels", items, using=alias) == EnqueueReport(enqueued=900)
    stored = Task.objects.using(alias).order_by("id").values_list("payload", flat=True)
    assert list(stored) == list(range(900))
    assert len(shares(items)) == 1


def test_references_out_of_order_keep_the_items_order(alias: str) -> None:
    names: list[str | None] = ["b", "é", "a", None, "\U0001f600", "Z", "~"]
    enqueue_many("parcels", [(name, None) for name in names], on_duplicate="ignore", using=alias)
    assert list(Task.objects.using(alias).order_by("id").values_list("reference", flat=True)) == names


def test_the_second_pass_finds_the_fault(alias: str) -> None:
    for item, words in [
        (("x" * 201, 1), "items[600]: reference="),
        (("", 1), "items[600]: reference=''"),
        (("a\0", 1), "without NUL"),
        (("a\ud800", 1), "lone surrogate"),
        ((5, 1), "items[600]: reference=5"),
        (("a", {"b": "\0"}), "items[600].payload.b"),
        (Letter(5), "items[600].payload.to"),  # type: ignore[arg-type]
        ({"refrence": "a"}, "items[600] has no argument"),
    ]:
        items = [*[(f"r-{number:03}", number) for number in range(600)], item]
        with pytest.raises((EnqueueError, PayloadError), match=re.escape(words)):
            enqueue_many("parcels", items, using=alias)
    assert not Task.objects.using(alias).exists()


def test_large_payloads_make_small_statements(settings: Any) -> None:
    """Given payloads of 1 MiB each, then no statement holds much more than 16 of them, nor is more read ahead."""
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {}}, "PAYLOAD_MAX_BYTES": 2**26}
    read = 0

    def items() -> Iterator[Any]:
        nonlocal read
        for _ in range(50):
            read += 1
            yield None, "x" * 2**20

    sizes = []
    for chunk in Chunks("parcels", items(), queue_settings("parcels", "default"), ["default"], None):
        sizes += map(len, chunk.values())
        assert read == sum(sizes)
    assert sum(sizes) == 50
    assert max(sizes) <= 18


@pytest.mark.django_db(databases=["default", "sqlite"], transaction=True)
def test_who_watches_is_told_every_id(alias: str) -> None:
    told: list[int] = []

    def listen(*, call: str, task_ids: tuple[int, ...], **_: Any) -> None:
        told.extend(task_ids if call == "put" else ())

    signals.task_changed.connect(listen)
    try:
        enqueue_many("parcels", [("a", 1), ("b", 2)], on_duplicate="ignore", using=alias)
        enqueue_many("parcels", [{"tag": "x"}], using=alias)
        enqueue("parcels", using=alias)
    finally:
        signals.task_changed.disconnect(listen)
    assert told == list(Task.objects.using(alias).order_by("id").values_list("id", flat=True))
    assert len(told) == 4
