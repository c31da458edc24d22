"""Ticks: one task for each, whatever was missed, edited or refused; and what the code declares."""

from dataclasses import asdict, replace
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db.models.functions import Now

from django_dbtaskqueue import enqueue, periodic, processor, registry
from django_dbtaskqueue.conf.cron import ticks
from django_dbtaskqueue.core.durations import Pauses
from django_dbtaskqueue.flow import schedule
from django_dbtaskqueue.flow.schedule import Definition, declare, enqueue_due
from django_dbtaskqueue.flow.selection import lock_first
from django_dbtaskqueue.models import Schedule, Task
from django_dbtaskqueue.operations.schedules import declared
from django_dbtaskqueue.poller.heartbeat import ScheduleJob
from tests.clock import SteppedClock
from tests.processing.conftest import Crate
from tests.support import held, sql

pytestmark = [pytest.mark.django_db(databases=["default", "sqlite"]), pytest.mark.usefixtures("taskqueue_registry")]
MINUTELY = Definition("parcels", "* * * * *", "UTC")


def hourly() -> Definition:
    """Return a definition with no tick near: a minute may end while a test runs."""
    return replace(MINUTELY, cron=f"{(datetime.now(UTC) + timedelta(minutes=30)).minute} * * * *")


def made(alias: str, definition: Definition = MINUTELY, *, ago: timedelta = timedelta(0), **columns: Any) -> Schedule:
    """Make the schedule of a person whose next tick is the first one since ``ago``."""
    first = next(ticks(definition.cron, definition.timezone, datetime.now(UTC) - ago))
    given = {"source": "person", "next_time": first, **asdict(definition), **columns}
    Schedule.objects.using(alias).create(name="s", **given)
    return row(alias)


def row(alias: str, name: str = "s") -> Schedule:
    return Schedule.objects.using(alias).get(pk=name)


def references(alias: str) -> list[str]:
    found = Task.objects.using(alias).order_by("pk").values_list("reference", flat=True)
    return [str(reference) for reference in found]


def test_a_tick_is_enqueued_once_and_the_next_one_waits(alias: str) -> None:
    before = made(alias, replace(hourly(), payload={"n": 1}, priority=-3), ago=timedelta(hours=1))
    seconds, queues = enqueue_due(alias, ())
    assert queues == ["parcels"]
    (task,) = Task.objects.using(alias)
    assert task.reference == f"s@{before.next_time:%Y-%m-%dT%H:%M:00Z}"
    assert (task.queue, task.payload, task.priority, task.status) == ("parcels", {"n": 1}, -3, "CREATED")
    after = row(alias)
    assert (after.last_time, after.last_task) == (before.next_time, task.pk)
    assert after.next_time == before.next_time + timedelta(hours=1)
    assert seconds == 0.0  # another tick may be due by now
    Schedule.objects.using(alias).update(next_time=Now() + timedelta(hours=1))
    assert enqueue_due(alias, ()) == (schedule.SCHEDULE_LOOK_S, [])
    assert len(references(alias)) == 1
    Schedule.objects.using(alias).update(next_time=Now() + timedelta(seconds=2))
    assert enqueue_due(alias, ())[0] <= 2  # at a tick that is nearer than the next look
    Schedule.objects.using(alias).update(next_time=before.next_time)  # as a restore does
    enqueue_due(alias, ())
    assert len(references(alias)) == 1


@pytest.mark.parametrize(("missed", "number"), [("skip", 0), ("one", 1), ("all", 5)])
def test_missed_ticks(alias: str, missed: str, number: int) -> None:
    before = made(alias, replace(hourly(), missed=missed), ago=timedelta(hours=5))
    enqueue_due(alias, ())
    hours = [before.next_time + timedelta(hours=hour) for hour in range(5)]
    assert references(alias) == [f"s@{hour:%Y-%m-%dT%H:%M:00Z}" for hour in hours[len(hours) - number :]]
    after = row(alias)
    assert (after.last_time, after.next_time) == (hours[-1], hours[-1] + timedelta(hours=1))
    assert after.note == ("" if number == 5 else f"{5 - number} missed")


@pytest.mark.parametrize("missed", ["skip", "one"])
def test_a_tick_that_is_a_little_late_is_not_missed(alias: str, missed: str) -> None:
    made(alias, replace(MINUTELY, cron="* * * * * *", missed=missed), ago=timedelta(seconds=10))
    enqueue_due(alias, ())
    assert 10 <= len(references(alias)) <= 60


def test_all_missed_ticks_are_at_most_a_hundred(alias: str) -> None:
    made(alias, replace(MINUTELY, missed="all"), ago=timedelta(days=400))
    enqueue_due(alias, ())
    found = references(alias)
    newest = row(alias).last_time
    assert found[-1] == f"s@{newest:%Y-%m-%dT%H:%M:00Z}"
    assert found[0] == f"s@{newest - timedelta(minutes=99):%Y-%m-%dT%H:%M:00Z}" and len(found) == 100


def test_a_tick_that_does_not_overlap_waits_for_the_task_before(alias: str) -> None:
    made(alias, replace(hourly(), overlap="skip", missed="all"), ago=timedelta(hours=3))
    enqueue_due(alias, ())
    (first,) = references(alias)  # of three ticks the newest
    later = row(alias).next_time - timedelta(hours=1)
    Schedule.objects.using(alias).update(next_time=later)
    enqueue_due(alias, ())
    assert references(alias) == [first] and row(alias).note == "skipped: the task before it was not finished"
    Task.objects.db_manager(alias).checkout("parcels", poller_instance="a", limit=1)[0].complete()
    Schedule.objects.using(alias).update(next_time=later + timedelta(seconds=1))
    enqueue_due(alias, ())
    assert len(references(alias)) == 2 and row(alias).note == ""
    # Nor does it wait for a task of another table with that id: an operator can give a schedule another queue
    other = enqueue("parcels", "not of this schedule", using=alias)
    Schedule.objects.using(alias).update(next_time=later + timedelta(seconds=2), last_task=other.pk)
    enqueue_due(alias, ())
    assert len(references(alias)) == 4 and row(alias).note == ""


def test_paused_unknown_and_undeclared_schedules_enqueue_nothing(alias: str) -> None:
    due = {"cron": "* * * * *", "next_time": datetime.now(UTC) - timedelta(seconds=5)}
    rows = Schedule.objects.using(alias)
    rows.create(name="paused", queue="parcels", paused=True, **due)
    rows.create(name="elsewhere", queue="of other code", **due)
    rows.create(name="gone", queue="parcels", source="code", code={}, **due)
    rows.create(name="typed", queue="parcels", payload_type="of.other.Code", **due)
    seconds, queues = enqueue_due(alias, ())
    assert (queues, references(alias)) == ([], [])
    assert seconds >= 1  # no poller works on what is not its own again and again
    assert enqueue_due(alias, {"gone"}) == (0.0, ["parcels"])


def test_a_refused_task_is_noted_and_tried_again(alias: str, settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {"capacity": 1}}}
    blocking = enqueue("parcels", "blocks", using=alias)
    before = made(alias, hourly(), ago=timedelta(hours=1))
    for _ in range(2):
        seconds, queues = enqueue_due(alias, ())
        assert (seconds >= 1, queues) == (True, [])
    assert "is full" in row(alias).note or "capacity" in row(alias).note
    assert (row(alias).next_time, row(alias).last_time) == (before.next_time, None)
    assert [one.levelname for one in caplog.records if "was refused" in one.message] == ["WARNING"]
    blocking.delete()
    enqueue_due(alias, ())
    assert (references(alias), row(alias).note) == ([f"s@{before.next_time:%Y-%m-%dT%H:%M:00Z}"], "")


def test_the_code_s_schedule_follows_the_code_but_where_a_person_edited_it(alias: str) -> None:
    declare(alias, {"s": (said := hourly())})
    first = row(alias)
    assert (first.source, first.cron, first.edited) == ("code", said.cron, []) and first.next_time > datetime.now(UTC)
    declare(alias, {"s": said})
    assert row(alias).next_time == first.next_time
    Schedule.objects.using(alias).update(priority=5, edited=["priority"])
    changed = Definition("letters", "0 7 * * *", "Europe/Madrid", priority=9)
    declare(alias, {"s": changed})
    again = row(alias)
    assert (again.queue, again.cron, again.timezone, again.priority) == ("letters", "0 7 * * *", "Europe/Madrid", 5)
    assert again.code == asdict(changed)
    assert again.next_time == next(ticks("0 7 * * *", "Europe/Madrid", datetime.now(UTC)))


def test_a_due_tick_is_not_lost_when_the_code_changes(alias: str) -> None:
    declare(alias, {"s": MINUTELY})
    due = datetime.now(UTC).replace(microsecond=0) - timedelta(seconds=5)
    Schedule.objects.using(alias).update(next_time=due)
    declare(alias, {"s": replace(MINUTELY, cron="0 7 * * *")})
    enqueue_due(alias, {"s"})
    assert references(alias) == [f"s@{due:%Y-%m-%dT%H:%M:%SZ}"]
    assert row(alias).next_time == next(ticks("0 7 * * *", "UTC", datetime.now(UTC)))


def test_what_a_person_made_first_stays_the_person_s(alias: str) -> None:
    made(alias, Definition("parcels", "5 * * * *", "UTC"))
    declare(alias, {"s": replace(MINUTELY, missed="all")})
    after = row(alias)
    assert (after.source, after.cron, after.missed, after.edited) == ("code", "5 * * * *", "one", ["cron", "missed"])


def test_periodic_is_stacked_on_a_processor_or_stands_beside_it() -> None:
    processor("parcels", payload=date)(lambda task: None)

    @periodic("0 7 * * *", name="above", timezone="Europe/Madrid", payload=Crate(3), missed="all")
    @processor("parcels", payload=Crate)
    @periodic("* * * * *", name="below", priority=2)
    def send(task: object) -> None: ...

    @periodic("1 * * * *")
    @processor("letters")
    class Sort:
        def process(self, task: object) -> None: ...

    periodic("2 * * * *", queue="mail", name="beside", overlap="skip")
    found = declared()
    kind = f"{Crate.__module__}.Crate"
    above = Definition("parcels", "0 7 * * *", "Europe/Madrid", {"weight": 3}, payload_type=kind, missed="all")
    assert found["above"] == above and found["below"] == Definition("parcels", "* * * * *", "UTC", priority=2)
    assert found["beside"] == Definition("mail", "2 * * * *", "UTC", overlap="skip")
    assert found[f"{__name__}.{Sort.__qualname__}"].queue == "letters"
    declare("default", found)
    Schedule.objects.filter(pk="above").update(next_time=Now())
    enqueue_due("default", found)
    (task,) = Task.objects.all()
    assert (task.payload, task.payload_type) == ({"weight": 3}, kind)


def test_a_poller_declares_in_each_database_the_schedules_of_its_queues(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"mail": {"database": "sqlite"}, "parcels": {}}}
    for queue in ("mail", "parcels"):
        periodic("0 7 1 1 *", queue=queue, name=f"{queue} of the year")
    for alias in ("default", "sqlite"):
        ScheduleJob(alias, lambda _: None).run()
    assert Schedule.objects.get().queue == "parcels" and Schedule.objects.using("sqlite").get().queue == "mail"


def test_periodic_says_what_is_wrong() -> None:
    def nothing(task: object) -> None: ...

    with pytest.raises(ImproperlyConfigured, match=r"@periodic.'0 7'.*has 2 fields"):
        periodic("0 7")
    with pytest.raises(ImproperlyConfigured, match=r"there is a schedule .* already. Give each of them a name="):
        periodic("1 * * * *")(periodic("2 * * * *")(nothing))
    with pytest.raises(ImproperlyConfigured, match=r"nothing is not a processor. Stack it on one @processor, or say"):
        declared()
    processor("parcels")(nothing)
    assert [one.queue for one in declared().values()] == ["parcels"]
    processor("letters")(nothing)
    with pytest.raises(ImproperlyConfigured, match="is the processor of letters, parcels"):
        declared()


def test_a_schedule_that_cannot_work_is_refused_at_the_start() -> None:
    for wrong, words in (
        ({"missed": "none"}, "missed='none' must be one of 'skip', 'one', 'all'"),
        ({"overlap": "no"}, "overlap='no' must be one of"),
        ({"priority": 10**6}, "priority=1000000 must be"),
        ({"payload": {"at": float("nan")}}, "NaN|nan"),
        ({"name": "n" * 151}, "over 150 characters"),
    ):
        before = registry.snapshot()
        periodic("* * * * *", **{"queue": "parcels", "name": "s", **wrong})
        with pytest.raises(ImproperlyConfigured, match=words):
            declared()
        registry.restore(before)


def test_a_module_that_is_imported_again_declares_its_schedule_again() -> None:
    for cron in ("1 * * * *", "2 * * * *"):
        periodic(cron, name="again")(processor("parcels")(lambda task: None))
    assert declared()["again"].cron == "2 * * * *"


@pytest.mark.django_db(transaction=True, databases=["default", "sqlite"])
def test_a_tick_that_another_poller_has_begun_is_left_to_it() -> None:
    """Where tasks are deleted when they are done, the reference of the tick keeps nobody from a second one."""
    made("default", hourly(), ago=timedelta(hours=1))
    with held(lambda: lock_first(schedule.rows_on("default").filter(pk="s"))):
        assert enqueue_due("default", ()) == (schedule.LOCKED_SCHEDULE_S, [])
        assert not references("default")


def test_a_schedule_that_raises_says_so_and_stops_no_other(alias: str, clock: SteppedClock) -> None:
    made(alias, hourly(), ago=timedelta(hours=1))
    Schedule.objects.using(alias).filter(pk="s").update(name="bad")
    depth = 2500 if alias == "default" else 900  # SQLite takes no more than 1,000
    sql("UPDATE dbtaskqueue_schedule SET payload = %s", [f"{'[' * depth}{']' * depth}"], alias)
    made(alias, hourly(), ago=timedelta(hours=1))
    pauses = Pauses(5.0, 300.0)
    clock.stop()
    assert enqueue_due(alias, (), pauses)[1] == ["parcels"]
    assert pauses.resting() == ["bad"]
    assert Schedule.objects.using(alias).exclude(note="").filter(pk="bad").exists()
    for pause in (5, 10, 20):  # each time longer
        clock.advance(pause - 1)
        assert pauses.resting() == ["bad"]
        clock.advance(1)
        assert pauses.resting() == []
        enqueue_due(alias, (), pauses)
    sql("UPDATE dbtaskqueue_schedule SET payload = %s", ["1"], alias)
    clock.advance(300)
    enqueue_due(alias, (), pauses)
    assert len(references(alias)) == 2


def test_a_declared_schedule_whose_row_cannot_be_written_stops_no_other(alias: str) -> None:
    """Given a payload that a person changed and SQL made unreadable, when the code changes, then the others follow."""
    names, before = ["bad", "good"], hourly()
    after = replace(before, cron=before.cron.replace("* * * *", "4 * * *"))
    declare(alias, dict.fromkeys(names, before))
    change = "UPDATE dbtaskqueue_schedule SET payload = %s, edited = '[\"payload\"]' WHERE name = 'bad'"
    sql(change, ["9" * 5000], alias)  # a number of more digits than Python reads
    declare(alias, dict.fromkeys(names, after))
    rows = dict(Schedule.objects.using(alias).values_list("name", "cron"))
    assert (rows["good"], rows["bad"]) == (after.cron, before.cron)
    assert Schedule.objects.using(alias).exclude(note="").get().name == "bad"
