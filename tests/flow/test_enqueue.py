"""Enqueue: in the caller's transaction or not at all, and never by halves."""

import inspect
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import reduce
from typing import Any
from uuid import UUID

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import IntegrityError, transaction
from django.utils import timezone

from django_dbtaskqueue import batch, chain, enqueue, enqueue_many, queue, registry, signal
from django_dbtaskqueue.conf.overrides import overridden_settings
from django_dbtaskqueue.core import codecs
from django_dbtaskqueue.core.exceptions import DuplicateTask, EnqueueError, PayloadError, TaskQueueError, UnknownQueue
from django_dbtaskqueue.core.states import CREATED
from django_dbtaskqueue.models import Queue, Task
from django_dbtaskqueue.operations.lookup import search
from django_dbtaskqueue.testing import drain
from tests.factories import make_task
from tests.support import PATIENCE, Unprintable, ended
from tests.testapp.models import Booking

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"])
SECOND = timedelta(seconds=1)


@pytest.fixture(params=["one", "many"])
def replace(alias: str, request: pytest.FixtureRequest) -> Callable[..., None]:
    def call(reference: str, payload: Any, *, group: str | None = None, **options: Any) -> None:
        options = {"on_duplicate": "replace", "using": alias, **options}
        if request.param == "one":
            enqueue("parcels", reference, payload, group=group, **options)
        else:
            enqueue_many("parcels", [{"reference": reference, "payload": payload, "group": group}], **options)

    return call


@dataclass
class Parcel:
    weight: Decimal
    posted: date
    stops: list[str]


def test_a_savepoint_takes_only_its_own_tasks_with_it(alias: str) -> None:
    with transaction.atomic(using=alias):
        enqueue("parcels", "outer", using=alias)
        for reference in ("inner", "last"):
            with pytest.raises(ZeroDivisionError), transaction.atomic(using=alias):
                enqueue("parcels", reference, using=alias)
                raise ZeroDivisionError
        enqueue("parcels", "inner", using=alias)
    assert set(Task.objects.using(alias).values_list("reference", flat=True)) == {"outer", "inner"}


def test_the_transaction_is_usable_after_a_refusal(alias: str) -> None:
    mistakes: list[tuple[Any, ...]] = [("parcels", "taken"), ("parcels", "new", {"a": "\0"}), ("parcel",), ("", 5)]
    with transaction.atomic(using=alias):
        enqueue("parcels", "taken", using=alias)
        for number, arguments in enumerate(mistakes):
            with pytest.raises(EnqueueError):
                enqueue(*arguments, using=alias)
            Booking.objects.using(alias).create(reference=str(number))
            enqueue("parcels", str(number), using=alias)
    assert Booking.objects.using(alias).count() == len(mistakes)
    assert set(Task.objects.using(alias).values_list("reference", flat=True)) == {"taken", *"0123"}
    with transaction.atomic(using=alias):  # a broken one takes no task, as it takes no statement
        with pytest.raises(IntegrityError):
            Booking.objects.using(alias).create(reference="0")
        with pytest.raises(transaction.TransactionManagementError):
            enqueue("parcels", using=alias)


def test_the_least_task(alias: str) -> None:
    row = Task.objects.using(alias).values().get(pk=enqueue("parcels", using=alias).pk)
    times = {name: row.pop(name) for name in list(row) if name.endswith("_time")}
    assert abs(times["create_time"] - timezone.now()) < PATIENCE * SECOND
    assert times["create_time"] == times["last_update_time"] == times["ready_time"] == times["next_process_time"]
    assert (times["start_time"], times["finish_time"], times["expire_time"]) == (None, None, None)
    assert row.pop("id") > 0
    assert {name: value for name, value in row.items() if value is not None} == {
        "queue": "parcels", "status": CREATED, "attempt": 0, "reenqueue_attempt": 0, "total_attempt": 0,
        "max_attempts": 4, "priority": 0, "lost_leases": 0,
    }  # fmt: skip


def test_run_at_is_when_it_is_due_but_never_in_the_past_and_delay_counts_from_it(alias: str) -> None:
    now, zones = timezone.now(), [timezone.get_fixed_timezone(minutes) for minutes in (0, 330, -660, 1200)]
    moments = [now + later for later in (timedelta(days=-3), timedelta(hours=2), timedelta(days=3000, microseconds=1))]
    moments += [datetime(2035, 3, 25, 2, 30, 0, 123456, tzinfo=zone) for zone in zones]
    for run_at in moments:
        for delay in (None, timedelta(minutes=1)):
            row = Task.objects.using(alias).get(pk=enqueue("parcels", run_at=run_at, delay=delay, using=alias).pk)
            expected = max(run_at, row.create_time) + (delay or timedelta(0))
            assert abs(row.ready_time - expected) < timedelta(milliseconds=2), (run_at, delay)


def test_a_payload_comes_back_and_a_typed_one_with_its_type(alias: str) -> None:
    for payload in (None, 0, "", [], {}, {"é": "\U0001f600", "n": [1.5, 2**70, None, True]}, "text", [[]]):
        task = enqueue("parcels", payload=payload, using=alias)
        assert task.payload == Task.objects.using(alias).get(pk=task.pk).payload == payload
        assert Task.objects.using(alias).filter(pk=task.pk, payload__isnull=True).exists() is (payload is None)
    parcel = Parcel(Decimal("1.50"), date(2013, 1, 31), ["JFK", "LGA"])
    task = Task.objects.using(alias).get(pk=enqueue("parcels", payload=parcel, using=alias).pk)
    assert task.payload_type == f"{Parcel.__module__}.Parcel" and codecs.decode(Parcel, task.payload) == parcel


def test_every_argument_is_stored_and_the_task_returned_is_the_row(alias: str) -> None:
    with transaction.atomic(using=alias):
        task = enqueue(
            "parcels", "ref-é", {"a": [1, None]}, delay=timedelta(minutes=5), ttl=timedelta(hours=1), priority=-7,
            tag="gpu", context={"trace": "t"}, lease=timedelta(seconds=90), using=alias,
        )  # fmt: skip
        stored = Task.objects.using(alias).get(pk=task.pk)
        assert (stored.queue, stored.reference, stored.payload) == ("parcels", "ref-é", {"a": [1, None]})
        assert (stored.context, stored.priority, stored.tag, stored.lease_seconds) == ({"trace": "t"}, -7, "gpu", 90.0)
        due = stored.create_time + timedelta(minutes=5)
        assert abs(stored.ready_time - due) < timedelta(milliseconds=2)
        assert abs(stored.expire_time - due - timedelta(hours=1)) < timedelta(milliseconds=2)
        assert task == stored and task._state.db == alias
        assert not task._state.adding
        assert task.get_deferred_fields().isdisjoint({
            "id", "queue", "reference", "status", "payload", "payload_type", "priority", "group_key", "tag", "attempt",
            "reenqueue_attempt", "total_attempt", "max_attempts", "create_time", "ready_time", "next_process_time",
        })  # fmt: skip
        for field in Task._meta.concrete_fields:
            assert getattr(task, field.attname) == getattr(stored, field.attname), field.attname


def test_the_manager_is_the_function_which_asks_once(alias: str, django_assert_num_queries: Any) -> None:
    task = Task.objects.db_manager(alias).enqueue("parcels", "r", {"a": 1}, priority=2)
    assert Task.objects.using(alias).get().pk == task.pk
    assert Task.objects.enqueue("parcels", "r2", using=alias).pk > task.pk
    assert Task.objects.using(alias).count() == 2
    with django_assert_num_queries(1, using=alias):
        enqueue("parcels", "r3", {"a": 1}, delay=SECOND, using=alias).payload  # noqa: B018 -- reading it costs nothing


def test_a_taken_reference_is_an_error_by_default_and_ignore_returns_its_holder(alias: str) -> None:
    statuses = [CREATED, "PROCESSING", *ended()]
    for status in statuses:
        holder = make_task(status, reference=status, payload={"old": 1}, using=alias)
        with pytest.raises(DuplicateTask) as refused:
            enqueue("parcels", status, {"new": 1}, using=alias)
        error = refused.value
        assert (error.queue, error.reference, error.task_id, error.status) == ("parcels", status, holder.pk, status)
        assert f"task {holder.pk} ({status})" in str(error)
        task = enqueue("parcels", status, {"new": 1}, on_duplicate="ignore", using=alias)
        assert (task.pk, task.status, task.payload) == (holder.pk, status, {"old": 1})
    assert [row.payload for row in Task.objects.using(alias)] == [{"old": 1}] * len(statuses)


def test_replace_rewrites_a_created_task(alias: str) -> None:
    old = make_task(
        reference="r", payload={"old": 1}, payload_type="Old", tag="a", context={"t": 0}, attempt=2,
        ready_time=timedelta(hours=5), expire_time=timedelta(hours=6), using=alias,
    )  # fmt: skip
    task = enqueue("parcels", "r", {"new": 1}, priority=9, on_duplicate="replace", using=alias)
    row = Task.objects.using(alias).get()
    assert task.pk == row.pk == old.pk
    assert (row.payload, row.payload_type, row.tag, row.context, row.priority) == ({"new": 1}, None, None, None, 9)
    assert (row.attempt, row.total_attempt, row.max_attempts, row.create_time) == (2, 2, 4, old.create_time)
    assert abs(row.ready_time - timezone.now()) < PATIENCE * SECOND
    assert (row.next_process_time, row.expire_time) == (row.ready_time, None)
    assert row.last_update_time > old.create_time


def test_replace_may_keep_the_due_time(alias: str, replace: Callable[..., None]) -> None:
    old = make_task(reference="r", ready_time=timedelta(hours=5), expire_time=timedelta(hours=6), using=alias)
    replace("r", {"new": 1}, keep_due=True)
    row = Task.objects.using(alias).get()
    assert row.payload == {"new": 1}
    kept = (old.ready_time, old.next_process_time, old.expire_time)
    assert (row.ready_time, row.next_process_time, row.expire_time) == kept


def test_a_replacement_in_another_group_says_so(alias: str, replace: Callable[..., None]) -> None:
    enqueue("parcels", "r", group="a", using=alias)
    for group in ("b", None):
        with pytest.raises(DuplicateTask, match="stays in its group") as refused:
            replace("r", {"new": 1}, group=group)
        assert "on_duplicate" not in str(refused.value)
    replace("r", {"new": 1}, group="a")
    assert Task.objects.using(alias).get().payload == {"new": 1}


def test_replacing_a_parked_task_leaves_it_parked(alias: str, replace: Callable[..., None]) -> None:
    make_task(reference="r", parked_by="no handler for Old", payload_type="Old", using=alias)
    for number, keep_due in enumerate((True, False)):
        replace("r", number, keep_due=keep_due)
        row = Task.objects.using(alias).get()
        assert (row.payload, row.ready_time, row.parked_by) == (number, None, "no handler for Old")
    mark = "moving to north (0123456789abcdef)"  # the other database may have it already, with the old values
    Task.objects.using(alias).update(parked_by=mark)
    for policy in ("replace", "replace_running"):
        with pytest.raises(DuplicateTask):
            replace("r", 2, on_duplicate=policy)
    assert Task.objects.using(alias).get().payload == 1


COMMANDS_OF_A_DATABASE = (
    "taskqueue status", "taskqueue list", "taskqueue show 1", "taskqueue doctor", "taskqueue set parcels ttl=1h",
    "taskqueue pause parcels", "taskqueue reprocess --filter status:ERROR --dry-run", "taskqueue bulk list",
    "taskqueue batches list", "taskqueue schedules list", "housekeeptasks",
)  # fmt: skip


def test_an_unknown_queue_or_database_is_named_with_its_nearest_match() -> None:
    with pytest.raises(UnknownQueue, match=r"Unknown queue 'parcles'\. Did you mean 'parcels'\?.*letters.*parcels"):
        enqueue("parcles")
    with pytest.raises(UnknownQueue, match="Did you mean 'parcels'"):
        enqueue_many("parcel", [])
    assert issubclass(UnknownQueue, EnqueueError) and issubclass(EnqueueError, TaskQueueError)
    calls: list[Callable[[str], object]] = [
        lambda name: enqueue("parcels", using=name),
        lambda name: enqueue_many("parcels", [{}], using=name),
        lambda name: batch("import", using=name).__enter__(),
        lambda name: chain({"queue": "parcels"}, using=name),
        lambda name: signal(1, "go", using=name),
        lambda name: queue("parcels", using=name).take(timeout=timedelta(0)),
        lambda name: search("parcels", using=name),
        lambda name: drain("parcels", using=name),
        *(lambda name, what=what: call_command(*what.split(), database=name) for what in COMMANDS_OF_A_DATABASE),
    ]
    for number, call in enumerate(calls):
        with pytest.raises((TaskQueueError, CommandError), match=r"'defalt' in DATABASES\. Did you mean 'default'\?"):
            call("defalt")
            pytest.fail(f"call {number} knows it")


def test_a_bad_payload_is_refused_before_anything_is_written(django_assert_num_queries: Any) -> None:
    overridden_settings("parcels", "default")  # the queue's row is read once a second
    for payload, path, reason in [
        ({"items": [0, 1, 2, {"when": datetime(2013, 1, 1)}]}, "items[3].when", "type datetime"),
        ({"a": {"b": math.nan}}, "a.b", "nan"),
        ({"a": "x\0y"}, "a", "NUL"),
        ({"odd key": object()}, '["odd key"]', "type object"),
    ]:
        with django_assert_num_queries(0), pytest.raises(PayloadError, match=reason) as refused:
            enqueue("parcels", payload=payload)
        assert refused.value.path == path and path in str(refused.value)


def test_a_payload_is_as_large_as_the_settings_say_and_of_its_type(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {}}, "PAYLOAD_MAX_BYTES": 100}
    enqueue("parcels", payload="x" * 98)
    with pytest.raises(PayloadError, match="100 are allowed"):
        enqueue("parcels", payload="x" * 99)
    # A typed one names the field that does not fit
    with pytest.raises(PayloadError, match=r"stops\[1\]"):
        enqueue("parcels", payload=Parcel(Decimal(1), date(2013, 1, 1), ["a", 5]))  # type: ignore[list-item]


def test_a_bad_argument_is_named() -> None:
    for options, words in [
        ({"reference": ""}, "reference='' must be"),
        ({"reference": "x" * 201}, "1 to 200 characters"),
        ({"reference": "a\ud800"}, "lone surrogate"),
        ({"group": 3}, "group="),
        ({"priority": 40_000}, "-32768 to 32767"),
        ({"priority": 1.5}, "whole number"),
        ({"priority": True}, "whole number"),
        ({"delay": 5}, "delay=5 must be a timedelta"),
        ({"delay": timedelta(seconds=-1)}, "from zero to a hundred years"),
        ({"delay": timedelta.max}, "from zero to a hundred years"),
        ({"ttl": timedelta(seconds=-1)}, "ttl="),
        ({"lease": "1m"}, "lease="),
        ({"run_at": "2030-01-01"}, "run_at='2030-01-01' must be a datetime"),
        ({"run_at": datetime.max}, "to 9000"),
        ({"context": "trace"}, "must be a mapping"),
        ({"context": {"a": math.nan}}, "context.a"),
        ({"on_parent_failure": "x"}, "on_parent_failure='x' must be one of 'hold'"),
        ({"on_duplicate": "merge"}, "on_duplicate='merge' must be one of 'error', 'ignore', 'replace'"),
        ({"lease": timedelta(milliseconds=1)}, "from 100 ms"),
        ({"timeout": 5}, "timeout=5 must be None or a timedelta"),
    ]:
        with pytest.raises(EnqueueError, match=re.escape(words)):
            enqueue("parcels", **options)
    for option, word in (("on_duplicate", "merge"), ("on_invalid", "skip"), ("on_parent_failure", "x")):
        with pytest.raises(EnqueueError, match=f"{option}='{word}'"):
            enqueue_many("parcels", [], **{option: word})  # type: ignore[arg-type]
    assert not Task.objects.exists()
    assert enqueue("parcels", lease=timedelta(milliseconds=100)).lease_seconds == 0.1


def test_replacing_with_a_smaller_budget_leaves_an_attempt(alias: str, settings: Any) -> None:
    tasks = Task.objects.db_manager(alias)
    enqueue("parcels", "p-1", {"version": 1}, using=alias)
    for _ in range(2):
        [task] = tasks.checkout("parcels", poller_instance="a")
        task.fail("no", delay=timedelta(0))
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {"max_attempts": 1}}}
    enqueue("parcels", "p-1", {"version": 2}, on_duplicate="replace", using=alias)
    [task] = tasks.checkout("parcels", poller_instance="a")
    assert (task.payload, task.attempt, task.max_attempts) == ({"version": 2}, 3, 3)


def test_a_queue_has_a_default_priority_that_an_operator_may_change(alias: str, settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {"priority": 7}}}
    assert enqueue("parcels", using=alias).priority == 7
    assert enqueue("parcels", priority=0, using=alias).priority == 0
    assert queue("parcels", using=alias).put().priority == 7
    Queue.objects.using(alias).create(name="parcels", overrides={"priority": -3})
    items: list[Any] = [("a", None), {"reference": "b", "priority": 0}, {"reference": "c", "group": "g"}]
    enqueue_many("parcels", items, using=alias)
    found = Task.objects.using(alias).filter(reference__in="abc").order_by("reference")
    assert list(found.values_list("priority", flat=True)) == [-3, 0, -3]
    with pytest.raises(ImproperlyConfigured, match="-32768 to 32767"):
        settings.DBTASKQUEUE = {"QUEUES": {"parcels": {"priority": 40_000}}}
        enqueue("parcels", using=alias)


# -- whatever the arguments are: the task can be run, or words refuse it -----------------------------------------------
FAR = timezone.get_fixed_timezone(14 * 60), timezone.get_fixed_timezone(-14 * 60)


class Liar(str):
    def __str__(self) -> str:
        return "fuzz"


UNTOLD = Unprintable()
DEEP: list[Any] = reduce(lambda inner, _: [inner], range(3000), list[Any]())
CIRCLE: dict[str, Any] = {}
CIRCLE["self"] = CIRCLE


def hostile() -> list[Any]:
    return [
        None, True, 0, -1, 2**31, 2**63, -(2**63) - 1, 10**400, 1.5, float("nan"), float("inf"), Decimal("1e400"), 1j,
        "", " ", "a", "\0", "\ud800", "x" * 100_000, "'; DROP TABLE x", "%s %(queue)s {0}", "\u202e", Liar("other"),
        b"", b"\xff", [], [None], ["a", "a"], (), {}, {"a": 1}, {1: 2}, {None: None}, {"\0": "\0"}, {1, 2}, iter([1]),
        (number for number in range(2)), DEEP, CIRCLE, UNTOLD, [UNTOLD], {"a": UNTOLD}, object(), int,
        len, lambda: None, Ellipsis, UUID(int=0), date.max, datetime.min, datetime.max, datetime(2026, 1, 1),
        *(moment.replace(tzinfo=zone) for moment in (datetime.min, datetime.max) for zone in FAR),
        datetime(2026, 1, 1, tzinfo=UTC), timedelta.min, timedelta.max, timedelta(0), timedelta(microseconds=1),
        timedelta(days=40_000), -timedelta(seconds=1), "throttle:1h", "unique:fields=a", "parcels",
    ]  # fmt: skip


ARGUMENTS = [name for name in inspect.signature(enqueue).parameters if name not in ("queue", "using")]


@pytest.mark.parametrize("size", [0, pytest.param(20_000, marks=pytest.mark.soak)])
@pytest.mark.usefixtures("taskqueue_registry")
def test_any_value_is_stored_or_refused_in_words(alias: str, size: int) -> None:
    registry.register("fuzz", lambda task: None)
    faults: dict[str, str] = {}
    for label, call, options in (*one_by_one(), *mixed(size)):
        try:
            with transaction.atomic(using=alias):
                call("fuzz", **options, using=alias)
        except Exception as error:
            if not isinstance(error, TaskQueueError | TypeError | ValueError) or len(str(error)) > 2000:
                faults[label] = f"{type(error).__name__}: {str(error)[:200]}"
    assert not faults, "\n".join(f"{label}: {text}" for label, text in faults.items())
    with transaction.atomic(using=alias):
        drain("fuzz", using=alias, with_scheduled=True)
    assert set(Task.objects.using(alias).values_list("status", flat=True)) <= {"COMPLETED", "CREATED", "POISON"}


def one_by_one() -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    for place, value in enumerate(hostile()):
        yield f"items={place}", many, {"items": value}
        yield f"item {place}", many, {"items": [value]}
        yield f"second payload {place}", many, {"items": [{"reference": "a"}, {"payload": value}]}
        for name in ARGUMENTS:
            yield f"{name}={place}", enqueue, {name: value}
            yield f"item {name}={place}", many, {"items": [{name: value}]}


def mixed(number: int) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    chance = random.Random(number)
    for turn in range(number):
        values = hostile()
        places = {name: chance.randrange(len(values)) for name in chance.sample(ARGUMENTS, 3)}
        yield f"{turn}: {places}", enqueue, {name: values[place] for name, place in places.items()}


def many(queue: str, *, items: Any, using: str) -> None:
    enqueue_many(queue, items, using=using)
