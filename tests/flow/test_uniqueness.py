"""Rules of uniqueness: which calls mean the same task, in the table, in a period, and between producers."""

from datetime import date, timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction

from django_dbtaskqueue import Debounce, DuplicateTask, Throttle, Unique, enqueue, enqueue_many, processor, queue
from django_dbtaskqueue.core.exceptions import EnqueueError
from django_dbtaskqueue.core.unique import RULE_FORMS, UniqueRule, parse_rule
from django_dbtaskqueue.models import Queue, Task, TaskHistory, UsedReference
from django_dbtaskqueue.operations import lookup
from django_dbtaskqueue.operations.explain import explain
from django_dbtaskqueue.operations.housekeeping import Housekeeper, RetentionPolicy
from django_dbtaskqueue.testing import advance, drain
from tests.flow.conftest import finish, take
from tests.support import PATIENCE, actors, at_once, held, taken_back

pytestmark = [pytest.mark.django_db(databases=["default", "sqlite"]), pytest.mark.usefixtures("taskqueue_registry")]
SECOND, MINUTE, HOUR = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1)
KEEPS = ("keep", "history", "delete")


@pytest.fixture(autouse=True)
def _queues(settings: Any) -> None:
    once = {"unique_over": "history", "keep": "delete"}
    settings.DBTASKQUEUE = {"QUEUES": {"work": {}, "once": once, **{keep: {"keep": keep} for keep in KEEPS}}}


def ids(alias: str) -> list[int]:
    return list(Task.objects.using(alias).order_by("pk").values_list("pk", flat=True))


def test_an_equal_payload_returns_the_task_until_it_is_finished(alias: str) -> None:
    def call(payload: Any) -> Task:
        return enqueue("work", payload=payload, unique=Unique(), using=alias)

    first = call({"user": 7, "how": [1, 2.0]})
    again = call({"how": [1.0, 2], "user": 7})  # the order of keys does not count, nor how a whole number is written
    assert (again.pk, first.enqueue_note) == (first.pk, "")
    assert again.enqueue_note.startswith(f"No task was inserted: there is task {first.pk} (CREATED). The rule allows")
    assert "until it is finished" in again.enqueue_note
    others = {call(payload).pk for payload in ({"user": 8}, {"how": [2, 1], "user": 7}, None, [], "7", 7)}
    assert len(others | {first.pk}) == 7
    lease = take(alias, "work")
    assert (lease.id, call({"user": 7, "how": [1, 2]}).pk) == (first.pk, first.pk)
    lease.complete()
    new = call({"user": 7, "how": [1, 2]})
    assert (new.pk in {first.pk, *others}, new.reference) == (False, first.reference)
    assert Task.objects.using(alias).get(pk=first.pk).reference == f"{first.reference}:{first.pk}"


def test_a_reference_says_nothing_of_a_guess_and_stays_while_the_key_is_changed(settings: Any) -> None:
    def reference() -> str:
        return str(enqueue("work", payload={"pin": 4821}, unique=Unique()).reference)

    first, old = reference(), settings.SECRET_KEY
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "new", [old]
    assert reference() == first, "processes with the old key alone derive the same"
    settings.SECRET_KEY_FALLBACKS = []
    assert reference() != first


def test_only_the_named_fields_count(alias: str) -> None:
    rule = Unique(fields=("user", "kind"))
    first = enqueue("work", payload={"user": 7, "kind": "a", "at": 1}, unique=rule, using=alias)
    as_well = Unique(fields=("kind", "user"))
    same = enqueue("work", payload={"at": 2, "kind": "a", "user": 7}, unique=as_well, using=alias)
    assert (same.pk, same.payload["at"]) == (first.pk, 1)
    assert enqueue("work", payload={"user": 7, "kind": "b"}, unique=rule, using=alias).pk != first.pk
    for payload in ({"user": 7, "knd": "a"}, None, [7]):
        with pytest.raises(EnqueueError, match="the payload has no field 'kind'"):
            enqueue("work", payload=payload, unique=rule, using=alias)
    assert len(ids(alias)) == 2


def test_until_started_a_call_after_the_start_makes_a_new_task(alias: str) -> None:
    rule = Unique(until="started")
    first = enqueue("work", payload=1, unique=rule, using=alias)
    queue("work", using=alias).release(take(alias, "work"))  # it has not started after all
    assert enqueue("work", payload=1, unique=rule, using=alias).pk == first.pk
    lease = take(alias, "work")
    assert enqueue("work", payload=1, unique=rule, using=alias).pk != first.pk
    lease.complete()  # under the name it had
    assert enqueue_many("work", [{"payload": 1}, {"payload": 2}], unique=rule, using=alias).ignored == 1
    take(alias, "work").fail("broken", delay=HOUR)  # it waits, and has started
    assert enqueue_many("work", [{"payload": 1}, {"payload": 1}], unique=rule, using=alias).enqueued == 1


def test_a_call_can_ask_for_an_error(alias: str) -> None:
    rule = Unique(on_duplicate="error")
    first = enqueue("work", payload=1, unique=rule, using=alias)
    told = rf"by task {first.pk} \(CREATED\). The rule allows one task of equal"
    with pytest.raises(DuplicateTask, match=told) as it:
        enqueue("work", payload=1, unique=rule, using=alias)
    assert it.value.task_id == first.pk
    for items in ([1], [2, 2]):
        with pytest.raises(DuplicateTask, match="The rule allows"):
            enqueue_many("work", [{"payload": item} for item in items], unique=rule, using=alias)
    assert ids(alias) == [first.pk]
    rule = Unique(period=HOUR, on_duplicate="error")
    enqueue("delete", payload=1, unique=rule, using=alias)
    take(alias, "delete").complete()
    for call, given in ((enqueue, {"payload": 1}), (enqueue_many, {"items": [{"payload": 1}]})):
        with pytest.raises(DuplicateTask, match="by a task that has left the table"):
            call("delete", **given, unique=rule, using=alias)


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("rule", [Throttle(HOUR), Unique(period=HOUR)], ids=str)
def test_a_period_counts_also_when_the_task_has_left_the_table(alias: str, keep: str, rule: UniqueRule) -> None:
    first = enqueue(keep, payload=1, unique=rule, using=alias)
    take(alias, keep).complete()
    known = enqueue(keep, payload=1, unique=rule, using=alias)
    assert known.pk == (first.pk if keep == "keep" else None)
    assert (known.reference, known.queue) == (first.reference, keep)
    assert "No task was inserted" in known.enqueue_note and "1h" in known.enqueue_note.replace(" ", "")
    assert enqueue_many(keep, [{"payload": 1}, {"payload": 2}], unique=rule, using=alias).ignored == 1
    advance(HOUR - MINUTE, using=alias)
    assert enqueue(keep, payload=1, unique=rule, using=alias).enqueue_note
    advance(2 * MINUTE, using=alias)
    assert not enqueue(keep, payload=1, unique=rule, using=alias).enqueue_note
    assert enqueue(keep, payload=1, unique=rule, using=alias).enqueue_note
    assert UsedReference.objects.using(alias).count() == 2


def test_after_its_period_a_throttle_does_not_wait_for_the_first_task(alias: str) -> None:
    throttled = enqueue("work", payload=1, unique=Throttle(HOUR), using=alias)
    unique = enqueue("work", payload=1, unique=Unique(period=HOUR), using=alias)
    advance(HOUR + SECOND, using=alias)
    assert enqueue("work", payload=1, unique=Throttle(HOUR), using=alias).pk not in (throttled.pk, unique.pk)
    assert enqueue("work", payload=1, unique=Unique(period=HOUR), using=alias).pk == unique.pk


def test_housekeeping_deletes_periods_that_are_over() -> None:
    enqueue_many("work", [{"payload": number} for number in range(3)], unique=Throttle(HOUR))
    enqueue("work", payload="long", unique=Throttle(3 * HOUR))
    advance(HOUR + SECOND)
    Housekeeper().turn(RetentionPolicy())
    assert UsedReference.objects.count() == 1
    Task.objects.purge()  # an operator's deletion ends the period
    assert not UsedReference.objects.exists()


def test_of_debounced_calls_the_last_wins_and_moves_the_task(alias: str) -> None:
    rule = Debounce(30 * MINUTE, 2 * HOUR, fields=("doc",))

    def call(text: str) -> Task:
        return enqueue("work", payload={"doc": 1, "text": text}, unique=rule, ttl=HOUR, using=alias)

    first = call("a")
    assert (first.enqueue_note, first.next_process_time - first.create_time) == ("", 30 * MINUTE)
    for number in range(3):
        advance(29 * MINUTE, using=alias)
        assert Task.objects.db_manager(alias).checkout("work", poller_instance="a") == []
        last = call(f"b{number}")
        assert (last.pk, last.payload["text"]) == (first.pk, f"b{number}")
        assert f"No task was inserted: task {first.pk} has the new values. The rule allows" in last.enqueue_note
    advance(29 * MINUTE, using=alias)
    last = call("last")  # 116 minutes after the first call: 4 are left of the two hours
    stored = Task.objects.using(alias).get()
    assert last.next_process_time == stored.next_process_time == stored.ready_time
    assert stored.next_process_time - stored.create_time == 120 * MINUTE
    assert abs(stored.expire_time - stored.next_process_time - HOUR) <= timedelta(milliseconds=1)
    advance(5 * MINUTE, using=alias)
    lease = take(alias, "work")
    assert lease.payload["text"] == "last"
    assert call("during").pk != first.pk  # the task that runs may not see the change
    lease.complete()
    assert call("after").enqueue_note


def test_debounced_items_of_many(alias: str) -> None:
    rule = Debounce(30 * MINUTE, 40 * MINUTE, fields=("doc",))
    items = [{"payload": {"doc": number % 2, "text": number}} for number in range(6)]
    report = enqueue_many("keep", items, unique=rule, using=alias)
    assert (report.enqueued, report.replaced, report.ignored) == (2, 4, 0)
    advance(20 * MINUTE, using=alias)
    report = enqueue_many("keep", [*items, {"reference": "x"}], unique=rule, using=alias)
    assert (report.enqueued, report.replaced, report.ignored) == (1, 6, 0)
    tasks = Task.objects.using(alias).filter(reference__startswith="debounce:")
    assert sorted(task.payload["text"] for task in tasks) == [4, 5]
    assert {task.next_process_time - task.create_time for task in tasks} == {40 * MINUTE}
    take(alias, "keep").complete()  # x
    advance(21 * MINUTE, using=alias)
    processor("keep")(lambda task: task.sleep(HOUR))
    assert drain("keep", using=alias).suspended == 2  # they wait, and have started
    report = enqueue_many("keep", items, unique=rule, using=alias)
    assert (report.enqueued, report.replaced) == (2, 4)


def test_a_debounced_task_of_a_group(alias: str) -> None:
    rule = Debounce(30 * SECOND, fields=("doc",))
    enqueue("work", group="g", using=alias)
    first = enqueue("work", payload={"doc": 1}, group="g", unique=rule, using=alias)
    assert enqueue("work", payload={"doc": 1}, group="g", unique=rule, using=alias).pk == first.pk
    with pytest.raises(DuplicateTask, match="in another group"):
        enqueue("work", payload={"doc": 1}, group="h", unique=rule, using=alias)
    assert len(ids(alias)) == 2


def test_a_rolled_back_call_holds_nothing(alias: str) -> None:
    kept, rules = [], (Unique(), Throttle(HOUR), Debounce(SECOND))
    for rule in rules:
        with transaction.atomic(using=alias):
            with taken_back(alias):
                enqueue("work", payload=1, unique=rule, using=alias)
                enqueue_many("work", [{"payload": 2}], unique=rule, using=alias)
            kept.append(enqueue("work", payload=1, unique=rule, using=alias))
            assert not kept[-1].enqueue_note
            assert enqueue("work", payload=1, unique=rule, using=alias).pk == kept[-1].pk
    assert ids(alias) == [task.pk for task in kept]
    assert UsedReference.objects.using(alias).count() == sum(rule.period is not None for rule in rules)


@pytest.mark.django_db(databases=["default", "sqlite"], transaction=True)
@pytest.mark.parametrize("rule", [Unique(), Unique(until="started"), Throttle(HOUR), Debounce(HOUR)], ids=str)
def test_of_many_producers_at_once_one_inserts(alias: str, rule: UniqueRule) -> None:
    def produce(index: int) -> int:
        if index % 2:
            return enqueue_many("delete", [{"payload": n} for n in range(3)], unique=rule, using=alias).enqueued
        return sum(not enqueue("delete", payload=n, unique=rule, using=alias).enqueue_note for n in range(3))

    assert sum(at_once(6, produce)) == Task.objects.using(alias).count() == 3
    # The tasks have left the table, then their period is over: each time all producers come at once.
    advance(HOUR / 2, using=alias)
    Task.objects.using(alias).all().run_now()
    for _ in range(3):
        take(alias, "delete").complete()
    assert sum(at_once(6, produce)) == Task.objects.using(alias).count() == (0 if rule.period else 3)
    advance(HOUR, using=alias)
    if rule.period:
        assert sum(at_once(6, produce)) == Task.objects.using(alias).count() == 3


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("rule", [Unique(until="started"), Debounce(timedelta(microseconds=1))], ids=str)
def test_a_task_does_not_start_before_a_call_for_it_commits(rule: UniqueRule) -> None:
    """Otherwise the task reads the data of before, and no other task reads the data of the call."""
    enqueue("work", payload=1, unique=rule)
    notes: list[str] = []
    with held(lambda: notes.append(enqueue("work", payload=1, unique=rule).enqueue_note)):
        assert Task.objects.checkout("work", poller_instance="a") == [] and notes != [""]
    assert len(Task.objects.checkout("work", poller_instance="a")) == 1


@pytest.mark.django_db(transaction=True)
def test_a_call_does_not_wait_for_what_runs_or_is_finished() -> None:
    """A producer holds the key until its transaction ends; a poller that settles does not wait for it."""
    enqueue("work", payload=1, unique=Unique())
    lease = take("default", "work")
    with actors(1) as (poller,), transaction.atomic():
        assert enqueue("work", payload=1, unique=Unique()).enqueue_note
        poller.do(lease.complete).result(PATIENCE)
        assert not enqueue("work", payload=1, unique=Unique()).enqueue_note


def test_a_processor_states_the_rule_of_its_queue(alias: str) -> None:
    processor("declared", unique=Throttle(HOUR, fields=("user",)))(lambda task: None)
    first = queue("declared", using=alias).put({"user": 1, "x": 1})
    assert queue("declared", using=alias).put({"user": 1, "x": 2}).pk == first.pk
    assert enqueue_many("declared", [{"payload": {"user": user}} for user in (1, 2, 2)], using=alias).enqueued == 1
    # A reference that the caller gives is the key of its task, and on_duplicate says what happens
    assert enqueue("declared", "mine", {"user": 1}, using=alias).reference == "mine"
    with pytest.raises(DuplicateTask, match="on_duplicate"):
        enqueue("declared", "mine", {"user": 1}, using=alias)
    assert enqueue("declared", payload={"user": 1}, unique="unique", using=alias).reference.startswith("unique:")
    with pytest.raises(ImproperlyConfigured, match=r"unique.*is the queue's"):
        processor("declared", payload=date, unique=Unique())(lambda task: None)


def test_settings_and_an_operator_state_it_as_text(alias: str, settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"mail": {"unique": "throttle:1h,fields=to"}}}
    first = enqueue("mail", payload={"to": "a"}, using=alias)
    assert enqueue("mail", payload={"to": "a", "x": 1}, using=alias).pk == first.pk
    Queue.objects.using(alias).update_or_create(name="mail", defaults={"overrides": {"unique": "unique"}})
    assert enqueue("mail", payload={"to": "a", "x": 1}, using=alias).pk != first.pk
    queue("made", using=alias).create(unique=Debounce(SECOND, fields=("to",)))
    assert Queue.objects.using(alias).get(pk="made").overrides == {"unique": "debounce:1s,fields=to"}
    with pytest.raises(ImproperlyConfigured, match=r"unique.*Did you mean 'throttle'"):
        settings.DBTASKQUEUE = {"QUEUES": {"mail": {"unique": "throtle:1h"}}}
        enqueue("mail", using=alias)


def test_a_rule_as_text_and_a_text_that_is_none() -> None:
    for text, rule in [
        ("unique", Unique()),
        ("unique:period=1h,until=started,on_duplicate=error", Unique((), HOUR, "started", "error")),
        ("throttle:1h", Throttle(HOUR)),
        ("throttle:1h,fields=a+b", Throttle(HOUR, fields=("b", "a"))),
        ("debounce:30s", Debounce(30 * SECOND)),
        ("debounce:30s,max_wait=5m", Debounce(30 * SECOND, 300 * SECOND)),
    ]:
        assert parse_rule(text) == rule == parse_rule(str(rule))
    for text in ("", "once", "throttle", "throttle:-1s", "debounce:1m,max_wait=1s", "unique:x=1"):
        with pytest.raises(ValueError) as error:
            parse_rule(text)
        assert RULE_FORMS in str(error.value)
        with pytest.raises(EnqueueError, match="The forms are"):
            enqueue("work", unique=text)


def test_errors_say_what_to_write() -> None:
    with pytest.raises(EnqueueError, match="two keys for one task"):
        enqueue("work", "r", unique=Unique())
    with pytest.raises(EnqueueError, match=r"must be Unique\(\), Throttle"):
        enqueue("work", unique=True)  # type: ignore[arg-type]
    with pytest.raises(EnqueueError, match="Leave delay= and run_at= out"):
        enqueue("work", delay=SECOND, unique=Debounce(SECOND))
    for wrong in ({"fields": "user"}, {"until": "done"}, {"on_duplicate": "replace"}, {"period": 3600}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Unique(**wrong)  # type: ignore[arg-type]


def test_the_task_says_which_rule_holds_it() -> None:
    says = {Unique(): "inserts no task", Throttle(HOUR): "the period is over", Debounce(HOUR): "replaces this task"}
    for rule, words in says.items():
        task = enqueue("history", payload=1, unique=rule)
        assert words in explain(task).sentence
        advance(2 * HOUR)
        take("default", "history").complete()
        assert words in explain(TaskHistory.objects.get(task_id=task.pk)).sentence
    assert "rule" not in explain(enqueue("work", "throttle:mine")).sentence
    task = enqueue("work", payload=1, unique=Unique(), priority=-1)
    take("default", "work").complete()
    enqueue("work", payload=1, unique=Unique())
    assert "a later call has inserted a new task" in explain(task).sentence


@pytest.mark.django_db(transaction=True)
def test_calls_that_inserted_nothing_are_counted() -> None:
    for _ in range(3):
        enqueue("work", payload=1, unique=Unique())
    enqueue_many("work", [{"payload": 1}, {"payload": 2}], unique=Unique())
    counted = queue("work").statistics().by_call
    assert (counted["put"], counted["ignored"]) == (2, 3)


# -- unique_over="history": a reference stays taken when its task has left the table -----------------------------------
def test_a_reference_stays_taken_when_its_task_is_gone(alias: str) -> None:
    first = enqueue("once", "r1", {"n": 1}, using=alias)
    with pytest.raises(DuplicateTask) as refused:
        enqueue("once", "r1", using=alias)
    assert (refused.value.task_id, refused.value.status) == (first.pk, "CREATED")
    assert enqueue("once", "r1", on_duplicate="ignore", using=alias).pk == first.pk
    assert enqueue("once", "r1", {"n": 2}, on_duplicate="replace", using=alias).payload == {"n": 2}
    assert UsedReference.objects.using(alias).count() == 1
    enqueue("delete", "r1", using=alias)
    finish(alias, "once")
    finish(alias, "delete")
    assert enqueue("delete", "r1", using=alias).pk
    for on_duplicate in ("error", "replace"):
        with pytest.raises(DuplicateTask, match="a task that has left the table"):
            enqueue("once", "r1", on_duplicate=on_duplicate, using=alias)
    known = enqueue("once", "r1", on_duplicate="ignore", using=alias)
    assert (known.pk, known.queue, known.reference) == (None, "once", "r1")
    with pytest.raises(EnqueueError, match=r"^after=.* must be a task that enqueue\(\) returned with an id"):
        enqueue("work", after=known, using=alias)
    assert not Task.objects.using(alias).filter(queue="once").exists()
    assert enqueue("once", "r2", using=alias).pk and enqueue("once", using=alias).pk


def test_it_is_taken_exactly_if_the_callers_transaction_commits(alias: str) -> None:
    with taken_back(alias):
        enqueue("once", "r1", using=alias)
    assert not UsedReference.objects.using(alias).exists()
    enqueue("once", "r1", using=alias)
    finish(alias, "once")
    items = [("r0", 0), ("r1", 1), ("r2", 2), (None, 3)]
    with pytest.raises(DuplicateTask, match=r"'r1'.*left the table"):
        enqueue_many("once", items, using=alias)
    assert UsedReference.objects.using(alias).count() == 1
    for counts in ((3, 1), (1, 3)):
        report = enqueue_many("once", items, on_duplicate="ignore", using=alias)
        assert (report.enqueued, report.ignored) == counts


def test_only_an_operators_deletion_frees_it() -> None:
    enqueue("once", "r1")
    assert Task.objects.purge() == 1
    enqueue("once", "r1")
    finish("default", "once")
    assert lookup.delete("once", "r1") is True
    assert lookup.delete("once", "r1") is False
    assert enqueue("once", "r1").pk
    (lease,) = Task.objects.checkout("once", poller_instance="a")
    lease.fail("lost", retry=False)
    assert Task.objects.housekeep(older_than=timedelta(0)) == 1
    with pytest.raises(DuplicateTask):
        enqueue("once", "r1")
    queue("once").drop()
    assert not UsedReference.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_of_many_producers_at_once_one_has_it() -> None:
    def try_it(_: int) -> bool:
        try:
            return bool(enqueue("once", "r1").pk)
        except DuplicateTask:
            return False

    assert at_once(6, try_it).count(True) == 1
    finish("default", "once")
    assert at_once(6, try_it).count(True) == 0
