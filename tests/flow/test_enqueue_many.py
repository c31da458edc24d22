"""Many tasks: all of them or none, in the order given, whatever the iterable."""

import asyncio
import inspect
import math
import operator
import os
import re
from collections import namedtuple
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
from asgiref.sync import sync_to_async
from django.db import connections, transaction
from django.utils import timezone

import django_dbtaskqueue
from django_dbtaskqueue import DuplicateTask, EnqueueReport, PayloadError, enqueue, enqueue_many
from django_dbtaskqueue.conf.overrides import overridden_settings
from django_dbtaskqueue.core import context
from django_dbtaskqueue.core.columns import InsertOptions
from django_dbtaskqueue.core.exceptions import EnqueueError
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow.enqueue import enqueue_task
from django_dbtaskqueue.flow.enqueue_many import Chunks, options_of
from django_dbtaskqueue.flow.insert import Batch, UniformRows
from django_dbtaskqueue.models import Task
from tests.factories import make_task
from tests.patience import PATIENCE
from tests.processing.conftest import Crate, Letter
from tests.support import sql, taken_back

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"])


def references(alias: str) -> list[str | None]:
    return list(Task.objects.using(alias).due().values_list("reference", flat=True))


def test_what_many_writes_is_what_one_writes(alias: str) -> None:
    options: dict[str, Any] = {
        "payload": {"é": [1.5, "\U0001f600", None, 2**70]}, "priority": -3, "tag": "gpu", "context": {"a": "'\"\\"},
        "delay": timedelta(minutes=5), "ttl": timedelta(hours=1), "run_at": timezone.now() + timedelta(hours=3),
        "lease": timedelta(seconds=90),
    }  # fmt: skip
    enqueue("parcels", "one", using=alias, **options)
    enqueue_many("parcels", [{"reference": "many", **options}, {"reference": "plain"}], using=alias)
    one, many = (Task.objects.using(alias).values().get(reference=name) for name in ("one", "many"))
    for name in one.keys() - {"id", "reference"}:
        if name.endswith("_time") and one[name] is not None:
            assert abs(one[name] - many[name]) < timedelta(seconds=PATIENCE), name
        else:
            assert one[name] == many[name], name
    assert abs(many["ready_time"] - options["run_at"] - options["delay"]) < timedelta(milliseconds=2)
    plain = Task.objects.using(alias).get(reference="plain")
    assert plain.ready_time == plain.create_time


class Mail(NamedTuple):
    to: str
    text: str


class Pair(NamedTuple):
    reference: str
    payload: object


def test_a_named_tuple_is_a_payload_and_a_pair_is_no_payload(alias: str) -> None:
    row = namedtuple("Row", "key value")("c", 3)  # as values_list(named=True) makes it
    enqueue_many("parcels", [Mail("ann", "hi")], using=alias)
    enqueue_many("parcels", [Mail("bob", "hi"), ("a", 1), Pair("b", 2), row], using=alias)
    stored = Task.objects.using(alias).order_by("pk").values_list("reference", "payload")
    assert [*stored][1:] == [(None, {"to": "bob", "text": "hi"}), ("a", 1), ("b", 2), ("c", 3)]
    assert stored[0] == (None, {"to": "ann", "text": "hi"})


def test_twelve_thousand_from_a_generator_and_none(alias: str, django_assert_max_num_queries: Any) -> None:
    items = ({"reference": f"r-{number:05}", "payload": {"number": number}} for number in range(12_000))
    with django_assert_max_num_queries(10, using=alias):
        assert enqueue_many("parcels", items, using=alias) == EnqueueReport(enqueued=12_000)
    assert Task.objects.using(alias).count() == 12_000
    ids = Task.objects.using(alias).order_by("id").values_list("payload__number", flat=True)
    assert list(ids[4_990:5_010]) == list(range(4_990, 5_010))
    overridden_settings("parcels", alias)  # the queue's row is read once a second
    with django_assert_max_num_queries(2, using=alias):  # the savepoint
        assert enqueue_many("parcels", iter(()), using=alias) == EnqueueReport()


ODD_TEXTS = [*"\t\n\r\\\"'{,é\U0001f600\x01", "\\N", "\\.", "null", "NULL", "a\\tb"]


@pytest.mark.parametrize("form", [lambda text, n: f"{text}{n}", lambda text, n: f"{n:05}{text}", lambda text, n: None])
def test_any_text_of_many_is_stored_as_it_is_in_the_order_given(alias: str, form: Callable[[str, int], str]) -> None:
    items = [(form(text, n), {text: [text, n, None]}) for n in range(20) for text in ODD_TEXTS]
    items[7:9] = [(form("null", 100), None), (form("\\N", 101), "null")]
    assert enqueue_many("parcels", items, using=alias) == EnqueueReport(enqueued=320)
    rows = Task.objects.using(alias).due()
    assert [(row.reference, row.payload) for row in rows] == items
    assert rows.filter(payload__isnull=True).count() == 1
    times = ("create_time", "last_update_time", "next_process_time", "ready_time")
    assert len({time for row in rows for time in operator.attrgetter(*times)(row)}) == 1
    assert {(row.status, row.max_attempts, row.attempt, row.queue) for row in rows} == {("CREATED", 4, 0, "parcels")}


@pytest.mark.parametrize("texts", [[], [""], ["a,b", "{}", '"', "\\", "NULL", " ", "é"]])
def test_an_array_parameter_comes_back_as_it_was(alias: str, texts: list[str]) -> None:
    session = Session.on(alias)
    dialect = session.sql.dialect
    rows = session.run(f"SELECT t FROM {dialect.texts('texts', 't')}", {"texts": dialect.array(texts)})
    assert [text for (text,) in rows] == texts


def test_many_are_stored_under_row_level_security() -> None:
    tenant = f"tenant_{os.getpid()}"  # roles belong to the server, which other runs use, too
    with taken_back():
        for statement in (
            f"CREATE ROLE {tenant}", f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {tenant}",
            f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {tenant}",
            "ALTER TABLE dbtaskqueue_task ENABLE ROW LEVEL SECURITY",
            "CREATE POLICY own ON dbtaskqueue_task USING (queue_name = 'parcels')", f"SET LOCAL ROLE {tenant}",
        ):  # fmt: skip
            sql(statement)
        assert enqueue_many("parcels", [(f"r-{n}", n) for n in range(400)]) == EnqueueReport(enqueued=400)
        assert enqueue_many("parcels", [(None, n) for n in range(400)]) == EnqueueReport(enqueued=400)


def test_an_error_of_the_iterable_or_of_a_late_item_takes_all_with_it(alias: str) -> None:
    def items(last: Callable[[], Any]) -> Iterator[Any]:
        yield from [{}] * 5_001  # more than a chunk
        yield last()

    with pytest.raises(ZeroDivisionError):
        enqueue_many("parcels", items(lambda: 1 / 0), using=alias)
    with pytest.raises(PayloadError, match=r"items\[5001\]\.payload\.when"):
        enqueue_many("parcels", items(lambda: {"payload": {"when": math.nan}}), using=alias)
    assert not Task.objects.using(alias).exists()


def test_reject_leaves_bad_items_out_and_says_why(alias: str) -> None:
    items: list[Any] = [
        ("a", 1), ("b", math.nan), "text", {"reference": "c", "priority": 10**6}, {"reference": "d"}, ("", 5),
    ]  # fmt: skip
    report = enqueue_many("parcels", items, on_invalid="reject", using=alias)
    assert (report.enqueued, report.ignored, report.replaced, report.rejected) == (2, 0, 0, 4)
    assert [(one.index, one.reference) for one in report.rejections] == [(1, "b"), (2, None), (3, "c"), (5, "")]
    assert all(f"items[{one.index}]" in str(one.error) for one in report.rejections)
    assert references(alias) == ["a", "d"]


@pytest.mark.parametrize("others", [1, 300])
@pytest.mark.parametrize("last", [("taken", 2), {"reference": "taken", "priority": 1}])  # columns, and rows
def test_a_taken_reference_is_an_error_that_names_it_and_its_holder(alias: str, others: int, last: Any) -> None:
    holder = make_task("COMPLETED", reference="taken", using=alias)
    with transaction.atomic(using=alias):
        with pytest.raises(DuplicateTask, match=rf"'taken'.*task {holder.pk} \(COMPLETED\)"):
            enqueue_many("parcels", [*((f"new-{n}", n) for n in range(others)), last], using=alias)
        assert references(alias) == []
        enqueue_many("parcels", [("after", 1)], using=alias)
    assert references(alias) == ["after"]


@pytest.mark.parametrize("others", [1, 300])
def test_ignore_counts_what_it_leaves(alias: str, others: int) -> None:
    make_task("ERROR", reference="old", payload=0, using=alias)
    more = [(None, 4)] * others
    for items, report in (
        ([("old", 1), ("new", 2), *more], EnqueueReport(enqueued=1 + others, ignored=1)),
        ([("new", 3), ("later", 3), *more], EnqueueReport(enqueued=1 + others, ignored=1)),
        ([("twice", 5), ("twice", 6), *more], EnqueueReport(enqueued=1 + others, ignored=1)),
        ([("none", 7), ("of-these", 7), *more], EnqueueReport(enqueued=2 + others)),
    ):
        assert enqueue_many("parcels", items, on_duplicate="ignore", using=alias) == report
    stored = dict(Task.objects.using(alias).exclude(reference=None).values_list("reference", "payload"))
    assert stored == {"old": 0, "new": 2, "later": 3, "twice": 5, "none": 7, "of-these": 7}


@pytest.mark.parametrize("apart", [1, 5_500])
def test_of_a_reference_that_stands_twice_replace_takes_the_last_item_and_counts_each(alias: str, apart: int) -> None:
    items = [("old", 1), ("new", 2), *[(None, 0)] * (apart - 1), ("new", 3)]
    with pytest.raises(DuplicateTask, match="'new'"):
        enqueue_many("parcels", items, using=alias)
    assert not Task.objects.using(alias).exists()
    make_task(reference="old", payload=0, using=alias)
    report = enqueue_many("parcels", items, on_duplicate="replace", using=alias)
    assert report == EnqueueReport(enqueued=apart, replaced=2)
    stored = dict(Task.objects.using(alias).exclude(reference=None).values_list("reference", "payload"))
    assert stored == {"old": 1, "new": 3}


def test_replace_refuses_all_when_one_is_no_longer_created(alias: str) -> None:
    make_task(reference="waiting", payload=0, using=alias)
    busy = make_task("PROCESSING", reference="busy", payload=0, using=alias)
    with pytest.raises(DuplicateTask, match=rf"'busy'.*task {busy.pk} \(PROCESSING\)"):
        enqueue_many("parcels", [("waiting", 1), ("busy", 1)], on_duplicate="replace", using=alias)
    assert set(Task.objects.using(alias).values_list("payload", flat=True)) == {0}


@pytest.mark.django_db(databases=["default", "sqlite"], transaction=True)
def test_the_async_twins_keep_the_same_promises(alias: str) -> None:
    async def story() -> None:
        with context.bound(request="async"):
            task = await django_dbtaskqueue.aenqueue("parcels", "r", Letter("you"), priority=2, using=alias)
        assert (task.reference, task.priority, task.payload_type) == ("r", 2, f"{Letter.__module__}.Letter")
        with pytest.raises(DuplicateTask):
            await django_dbtaskqueue.aenqueue("parcels", "r", using=alias)
        items = [("a", 1), ("r", 2)]
        report = await django_dbtaskqueue.aenqueue_many("parcels", items, on_duplicate="ignore", using=alias)
        assert report == EnqueueReport(enqueued=1, ignored=1)
        with pytest.raises(PayloadError):
            await django_dbtaskqueue.aenqueue_many("parcels", [("b", 1), ("c", math.nan)], using=alias)
        await sync_to_async(connections.close_all)()

    asyncio.run(story())
    assert Task.objects.using(alias).get(reference="r").context == {"request": "async"}
    assert sorted(map(str, Task.objects.using(alias).values_list("reference", flat=True))) == ["a", "r"]
    first, _, rest = str(inspect.getdoc(django_dbtaskqueue.aenqueue)).partition("\n\n")
    assert first == "``enqueue`` for async code: the same arguments, promises and errors."
    assert rest == inspect.getdoc(enqueue)


# -- on their way into statements: columns where items are alike, rows where not, and never too much at once -----------
def shares(items: Any) -> list[Batch]:
    chunks = Chunks("parcels", items, overridden_settings("parcels", "default"), ["default"], None)
    return [share for one in chunks for share in one.values()]


UNIFORM: list[list[Any]] = [
    [{"reference": "a", "payload": 1}, {"payload": {"b": []}}, {"reference": "c"}, {}],
    [("a", 1), (None, None)],
    [Letter("me"), Letter("you")],
    [("a", Letter("me")), (None, Letter("you"))],
]
NOT_UNIFORM: list[list[Any]] = [
    [("a", 1), {"reference": "b"}],
    [{"reference": "a", "priority": 1, "tag": "gpu", "context": {"n": 1}}],
    [("a", Letter("me")), ("b", Crate(1))],
]
ODD = [[("a", (1, 2))], [("a", 1e16)]]  # which form they take depends on the JSON writer that is installed


@pytest.mark.parametrize("items", [*UNIFORM, *NOT_UNIFORM, *ODD])
def test_either_way_many_is_what_one_is(alias: str, items: list[Any]) -> None:
    [share] = shares(items)
    assert items in ODD or (isinstance(share, UniformRows), len(share)) == (items in UNIFORM, len(items))
    with context.bound(trace="t"):
        for item in items:
            enqueue_task("letters", options_of(0, item), InsertOptions(using=alias))
        enqueue_many("parcels", items, using=alias)
    ours = {"id", "queue", "max_attempts", "create_time", "ready_time", "next_process_time", "last_update_time"}
    columns = [field.name for field in Task._meta.concrete_fields if field.name not in ours]
    rows = Task.objects.using(alias).order_by("id").values(*columns)
    assert list(rows.filter(queue="letters")) == list(rows.filter(queue="parcels"))


def test_a_chunk_of_mixed_slices_is_one_statement_in_order(alias: str) -> None:
    items: list[Any] = [(None, number) for number in range(900)]
    items[700] = {"payload": 700, "tag": "gpu"}
    assert enqueue_many("parcels", items, using=alias) == EnqueueReport(enqueued=900)
    stored = Task.objects.using(alias).order_by("id").values_list("payload", flat=True)
    assert list(stored) == list(range(900)) and len(shares(items)) == 1
    # So are references out of order
    names: list[str | None] = ["b", "é", "a", None, "\U0001f600", "Z", "~"]
    enqueue_many("parcels", [(name, None) for name in names], on_duplicate="ignore", using=alias)
    assert list(Task.objects.using(alias).order_by("id").values_list("reference", flat=True))[900:] == names


@pytest.mark.parametrize("before", [0, 600])
def test_a_bad_item_is_named(alias: str, before: int) -> None:
    """Where many of one form stand before it, a second pass finds it."""
    for item, words in [
        (("a\0", 1), "without NUL"),
        (("a", {"b": "\0"}), "[#].payload.b"),
        (Letter(5), "[#].payload.text"),  # type: ignore[arg-type]
        ({"refrence": "a"}, "[#] has no argument 'refrence'. Did you mean 'reference'?"),
        ("text", "[#] is 'text'"),
        (("a", 1, 2), "[#] is ('a', 1, 2)"),
        ({"priority": 1.5}, "[#]: priority=1.5"),
        ({"context": {"a": math.nan}}, "[#]: Context cannot be stored: context.a"),
    ]:
        items: list[Any] = [*[(f"r-{number:03}", number) for number in range(before)], item]
        with pytest.raises((EnqueueError, PayloadError), match=re.escape(words.replace("[#]", f"items[{before}]"))):
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
    for chunk in Chunks("parcels", items(), overridden_settings("parcels", "default"), ["default"], None):
        sizes += map(len, chunk.values())
        assert read == sum(sizes)
    assert sum(sizes) == 50 and max(sizes) <= 18
