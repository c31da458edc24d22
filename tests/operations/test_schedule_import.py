"""Schedules of django-celery-beat and django-q2 come over: their real models and tables, and what they say is due."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from importlib import import_module
from io import StringIO
from itertools import islice
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.apps import apps
from django.contrib import admin
from django.core.management import CommandError, call_command
from django.db import connection
from django.test import modify_settings, override_settings

from django_dbtaskqueue import registry
from django_dbtaskqueue.conf.cron import ticks
from django_dbtaskqueue.models import AuditEntry, Schedule
from tests.operations.site import command

START = datetime(2026, 3, 27, 11, 7, tzinfo=UTC)  # two days before Madrid's clocks change


def work(task: object) -> None:
    """A processor that was a task of the other queue."""


TASK = f"{work.__module__}.{work.__qualname__}"


@pytest.fixture(autouse=True)
def processor(taskqueue_registry: None) -> Iterator[None]:
    registry.register("letters", work)
    pages = dict(admin.site._registry)  # the apps register pages of theirs
    yield
    admin.site._registry.clear()
    admin.site._registry.update(pages)


def installed(label: str, needed: str) -> Iterator[None]:
    """Install an app, and make its tables inside the test's transaction."""
    pytest.importorskip(needed, reason="the extra test is not installed")
    with modify_settings(INSTALLED_APPS={"append": [label]}), connection.schema_editor() as editor:
        for model in apps.get_app_config(label).get_models():
            if not model._meta.proxy:
                editor.create_model(model)
        yield


@pytest.fixture
def celery(db: None) -> Iterator[None]:
    yield from installed("django_celery_beat", "django_celery_beat")


@pytest.fixture
def q2(db: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with override_settings(Q_CLUSTER={"orm": "default", "timeout": 60, "retry": 120}):
        for _ in installed("django_q", "django_q"):
            conf = import_module("django_q.conf").Conf  # it reads the settings once
            monkeypatch.setattr(conf, "TIME_ZONE", "Europe/Madrid")
            monkeypatch.setattr(conf, "CATCH_UP", False)
            yield


def make(model: str, **fields: Any) -> Any:
    return apps.get_model("django_celery_beat", model).objects.create(**fields)


def crontab(name: str, times: dict[str, str], **fields: Any) -> Any:
    made = make("CrontabSchedule", timezone="Europe/Madrid", **times)
    return make("PeriodicTask", **{"name": name, "task": TASK, "crontab": made, **fields})


def answered(source: str, *options: str, code: int = 0) -> str:
    out = StringIO()
    with nullcontext() if code == 0 else pytest.raises(SystemExit, match=str(code)):
        call_command("taskqueue", "schedules", "import", "--from", source, *options, stdout=out)
    return out.getvalue()


def imported(source: str, *options: str, code: int = 0) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(answered(source, *options, "--json", code=code))}


def cron(name: str) -> tuple[str, str]:
    return Schedule.objects.values_list("cron", "timezone").get(pk=name)


CRONTABS = {
    "noon": {"minute": "0", "hour": "12"},
    "quarters": {"minute": "*/15"},
    "weekdays": {"minute": "30", "hour": "8,17", "day_of_week": "mon-fri"},
    "Sunday": {"minute": "5", "hour": "4", "day_of_week": "0"},
    "over the week's end": {"minute": "5", "hour": "4", "day_of_week": "fri-mon"},
    "even days of the week": {"minute": "5", "hour": "4", "day_of_week": "*/2"},
    "office": {"minute": "10-50/20", "hour": "*/3"},
    "first of a quarter": {"minute": "0", "hour": "6", "day_of_month": "1", "month_of_year": "*/3"},
    "first and third Monday": {"minute": "0", "hour": "9", "day_of_week": "1", "day_of_month": "1-7,15-21"},
}


def test_a_row_that_cannot_be_read_stops_no_other(celery: None) -> None:
    for name, fields in {"aeons": {"every": 2**31 - 1}, "eras": {"every": 1, "period": "eras"}, "deep": {}}.items():
        interval = make("IntervalSchedule", **{"every": 1, "period": "days", **fields})
        make("PeriodicTask", name=name, task=TASK, interval=interval, args="[" * 5000 if name == "deep" else "[]")
    crontab("noon", CRONTABS["noon"], kwargs='{"password": "c4n4ry"}')
    assert "c4n4ry" not in answered("django-celery-beat", "--dry-run", "--json", code=1)
    rows = imported("django-celery-beat", "--reason", "we come over", code=1)
    assert AuditEntry.objects.get().reason == "we come over"
    made = [name for name, row in rows.items() if row["result"] == "made"]
    assert made == ["noon"] == [*Schedule.objects.values_list("name", flat=True)]
    assert all(rows[name]["reason"] for name in ("aeons", "eras", "deep"))


def test_a_crontab_of_celery_has_the_same_times_here(celery: None) -> None:
    rows = {name: crontab(name, times) for name, times in CRONTABS.items()}
    imported("django-celery-beat")
    zone = ZoneInfo("Europe/Madrid")
    for name, row in rows.items():
        theirs, moment, schedule = [], START.astimezone(zone), row.crontab.schedule
        for _ in range(12):
            at, pause, _now = schedule.remaining_delta(moment)
            moment = at + pause
            theirs.append(moment.replace(tzinfo=None))
        ours = [one.astimezone(zone).replace(tzinfo=None) for one in islice(ticks(*cron(name), START), 12)]
        assert ours == theirs, (name, cron(name))
    assert cron("quarters") == ("*/15 * * * *", "Europe/Madrid")
    assert cron("first and third Monday") == ("0 9 * * 1#1,1#3", "Europe/Madrid")


INTERVALS: list[tuple[int, str, str]] = [
    *((10, "seconds", "*/10 * * * * *"), (3600, "seconds", "7 * * * *"), (500_000, "microseconds", "")),
    *((1, "minutes", "* * * * *"), (15, "minutes", "7-59/15 * * * *"), (90, "minutes", "")),
    *((6, "hours", "7 5-23/6 * * *"), (1, "days", "7 11 * * *"), (7, "days", "7 11 * * 5"), (2, "days", "")),
]


def test_an_interval_keeps_its_phase_or_is_named(celery: None) -> None:
    for every, period, _expected in INTERVALS:
        made = make("IntervalSchedule", every=every, period=period)
        make("PeriodicTask", name=f"{every} {period}", task=TASK, interval=made, last_run_at=START)
    found = imported("django-celery-beat", code=1)
    for every, period, expected in INTERVALS:
        name = f"{every} {period}"
        if not expected:
            assert found[name]["reason"].startswith("every ") and not Schedule.objects.filter(pk=name).exists()
            continue
        assert cron(name) == (expected, "UTC")
        first, second = islice(ticks(expected, "UTC", START), 2)
        assert second - first == timedelta(**{period: every})
        assert (first - START) % timedelta(**{period: every}) == timedelta(0)


def test_what_a_row_of_celery_becomes(celery: None) -> None:
    daily = {"minute": "0", "hour": "3"}
    arguments = {"args": '["Ada", 2]', "kwargs": '{"copy": true}', "priority": 4, "expire_seconds": 60}
    for name, facts in {
        "plain": {}, "with arguments": arguments, "off": {"kwargs": '{"to": "Ada"}', "enabled": False},
        "elsewhere": {"task": "shop.send"}, "nowhere": {"task": "shop.forgotten"}, "ends": {"expires": START},
        "begins": {"start_time": datetime(9000, 1, 1, tzinfo=UTC)}, "once": {"one_off": True},
        "celery.backend_cleanup": {"task": "celery.backend_cleanup"},
    }.items():  # fmt: skip
        crontab(name, daily, **facts)
    crontab("both days", {**daily, "day_of_week": "1", "day_of_month": "13"})
    make("PeriodicTask", name="sun", task=TASK, solar=make("SolarSchedule", event="sunrise", latitude=1, longitude=1))
    make("PeriodicTask", name="clock", task=TASK, clocked=make("ClockedSchedule", clocked_time=START), one_off=True)
    options = "--queue-of", "shop.send=letters"
    dry = imported("django-celery-beat", *options, "--dry-run", code=1)
    assert not Schedule.objects.exists() and not AuditEntry.objects.exists()
    found = imported("django-celery-beat", *options, code=1)
    again = imported("django-celery-beat", *options, code=1)
    assert set(Schedule.objects.values_list("name", flat=True)) == {"plain", "with arguments", "off", "elsewhere"}
    for name, row in found.items():
        made = row["result"] == "made"
        assert dry[name] == {**row, "result": "would be made" if made else "not imported"}
        assert again[name] == {**row, "result": "unchanged" if made else "not imported"}
    payloads = {row.name: (row.queue, row.payload, row.paused) for row in Schedule.objects.exclude(name="elsewhere")}
    given = {"plain": None, "with arguments": {"args": ["Ada", 2], "kwargs": {"copy": True}}, "off": {"to": "Ada"}}
    assert payloads == {name: ("letters", payload, name == "off") for name, payload in given.items()}
    assert len(found["with arguments"]["notes"]) == 2
    for name, word in {
        "nowhere": "add --queue-of shop.forgotten=QUEUE", "both days": "13 of the month and 1 of the week",
        "ends": "it ends at 2026-03-27", "begins": "it begins at 9000", "once": "runs once", "clock": "runs once",
        "sun": "follows the sun", "celery.backend_cleanup": "Celery itself",
    }.items():  # fmt: skip
        assert word in found[name]["reason"], name


def test_a_schedule_that_a_person_changed_here_is_left_and_named(celery: None) -> None:
    crontab("plain", {"minute": "0", "hour": "3"})
    imported("django-celery-beat")
    command("schedules", "edit", "plain", "--cron", "0 4 * * *")
    assert "with another cron" in imported("django-celery-beat", code=1)["plain"]["reason"]
    assert cron("plain") == ("0 4 * * *", "Europe/Madrid")


def schedule(name: str, kind: str, **fields: Any) -> Any:
    given = {"func": TASK, "next_run": START, **fields}
    return apps.get_model("django_q", "Schedule").objects.create(name=name, schedule_type=kind, **given)


def test_a_schedule_of_django_q2_has_the_same_times_here(q2: None) -> None:
    rows = [schedule(kind, kind) for kind in ("H", "D", "W", "M", "BM", "Q", "Y")]
    rows.append(schedule("minutes", "I", minutes=20))
    imported("django-q2")
    for row in rows:
        theirs = [row.next_run]
        for _ in range(8):
            theirs.append(row.calculate_next_run(theirs[-1]))
        ours = list(islice(ticks(*cron(row.name), START - timedelta(seconds=1)), 9))
        assert ours == theirs, (row.name, cron(row.name))


def test_what_a_row_of_django_q2_becomes(q2: None) -> None:
    schedule("cron", "C", cron="30 7 * * 1-5", args="1, 'Ada'", kwargs="copy=True, to={'a': 1}")
    schedule("one argument", "D", args="'Ada'", kwargs="{'copy': None}", hook="shop.done", intended_date_kwarg="on")
    schedule("some", "D", repeats=3)
    schedule("last day", "M", next_run=START.replace(day=31))
    schedule("code", "D", args="open('x')")
    for name, kind in (("once", "O"), ("two weeks", "BW"), ("twice", "D"), ("twice", "W")):
        schedule(name, kind)
    unnamed = schedule("", "D")
    found = imported("django-q2", code=1)
    rows = {row.name: row for row in Schedule.objects.all()}
    assert set(rows) == {"cron", "one argument", "twice", f"{TASK} {unnamed.pk}"}
    assert cron("cron") == ("30 7 * * 1-5", "Europe/Madrid")
    assert rows["cron"].payload == {"args": [1, "Ada"], "kwargs": {"copy": True, "to": {"a": 1}}}
    one = rows["one argument"]
    assert (one.payload, one.missed) == ({"args": ["Ada"], "kwargs": {"copy": None}}, "one")
    assert len(found["one argument"]["notes"]) == 2
    for name, word in {"once": "runs once", "some": "3 times more", "two weeks": "every two weeks",
                       "last day": "day 31", "code": "are not JSON", "twice": "has this name"}.items():  # fmt: skip
        assert word in found[name]["reason"], name


def test_a_person_reads_what_becomes_what_and_a_task_that_no_row_has_is_a_typing_error(q2: None) -> None:
    schedule("nightly", "D")
    schedule("once", "O")
    text = answered("django-q2", "--dry-run", code=1)
    assert "7 12 * * * Europe/Madrid → letters" in text and "it runs once" in text
    assert "1 of 2 schedules can be imported. Nothing was changed: --dry-run." in text
    schedule("weekly", "W", func="shop.send")
    with pytest.raises(CommandError, match=r"no schedule there has this task. Did you mean 'shop.send'\?"):
        imported("django-q2", "--queue-of", "shop.sent=letters")


def test_what_is_missing_is_said() -> None:
    for options, words, code in (
        ([], "Add --from django-celery-beat or --from django-q2", 2),
        (["--from", "django-q2", "--queue-of", "shop.send"], "write TASK=QUEUE", 2),
        (["--from", "django-q2"], "django_q is not in INSTALLED_APPS", 1),
    ):
        with pytest.raises(CommandError, match=words) as refused:
            command("schedules", "import", *options)
        assert refused.value.returncode == code
