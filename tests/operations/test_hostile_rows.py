"""Hostile rows: whatever SQL has written into a column, each page, route and command answers, and a poller goes on.

Each table gets rows of which all columns of one kind hold a hostile value. The soak gives each column rows of its own.
"""

import io
import re
import traceback
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from django.apps import apps
from django.contrib.admin.utils import quote
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.db import DatabaseError, connection, models, transaction
from django.db.models.functions import Now
from django.test import Client

from django_dbtaskqueue import enqueue, processor
from django_dbtaskqueue.admin import ADMIN_CLASSES
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.models import AbstractTask, BulkOperation, Limit, Poller, Queue, Schedule, Task
from django_dbtaskqueue.models.tasks import TaskColumns
from django_dbtaskqueue.operations import bulk
from django_dbtaskqueue.testing import run_poller
from tests.conftest import ProcessDatabase
from tests.factories import QUEUE, make_task
from tests.operations.site import ADMIN, logged_in
from tests.support import taken_back, until

Column = Any
DEEP, LONG = "[" * 2500 + "]" * 2500, "1" * 6000
VALUES: dict[type[Column], list[Any]] = {
    models.DateTimeField: ["infinity", "-infinity", "10000-06-01", "0044-03-15 BC", "0001-01-01", "9999-12-31"],
    models.JSONField: [
        "5", '"x"', "null", "[]", "{}", "[1]", "[null]", "[{}]", '["nosuch"]', '{"a": "b"}', '{"1": 1e400}', DEEP, LONG,
        '{"queue": [], "verb": [], "tasks": 5, "skipped_ids": 5}', '{"tasks": [{}], "skipped_ids": {"x": 5}}',
        '[{"queue": [], "types": 5}]', '{"lease": "1e999s"}', '{"rate": "9/x", "capacity": 1e30}',
    ],
    models.CharField: ["", "<b>", "\r\n\x1b[2J", "nosuch.model", "auth.user", "%s{0}", "é" * 100],
    models.IntegerField: [0, -1, 32767, 2**31 - 1, 2**63 - 1, -(2**63)],
    models.FloatField: ["NaN", "Infinity", "-1", "1e308"],
}  # fmt: skip
ON_SQLITE = {
    models.DateTimeField: ["", "x", "10000-06-01", "2020-02-31", 5, -1e300, "2020-01-01T25:00"],
    **{kind: VALUES[kind] for kind in (models.JSONField, models.CharField)},
}
NUMBERS = count(10_000)  # the database gives lower ones
# What a row says so that something is done with it.
SAID = {
    "queue": QUEUE, "location": "dbtaskqueue.task", "minute": Now(), "outcome": "completed", "kind": "report",
    "verb": "reprocess", "query": "id:1", "fingerprint": "f" * 40,
}  # fmt: skip
GLOBAL = ["status", "list", "doctor", "settings parcels", "bulk list", "schedules list", "batches list", "tokens"]
# Of each kind of row: its command and its route.
ONE_OF = {"task": "show", "bulkoperation": "bulk show", "schedule": "schedules show", "batch": "batches show",
          "queue": "settings"}  # fmt: skip
ROUTE_OF = {"task": "tasks", "bulkoperation": "operations", "schedule": "schedules", "queue": "queues",
            "failuregroup": "failures"}  # fmt: skip
LISTS = "health status trends doctor tasks tasks/count operations queues batches schedules pollers failures audit"


def kind_of(field: Column) -> type[Column] | None:
    """Return the kind of hostile values that a column gets."""
    wholes = (models.BooleanField, models.ForeignKey)
    if isinstance(field, models.TextField):
        return models.CharField
    return next((one for one in VALUES if isinstance(field, one) and not isinstance(field, wholes)), None)


def plain_row(model: type[models.Model]) -> models.Model:
    """Make a row that says as little as it may."""
    number, given = next(NUMBERS), dict[str, Any]()
    for field in model._meta.concrete_fields:
        optional = field.null or field.has_default() or field.has_db_default()
        if field.is_relation and not field.null:
            given[field.name] = plain_row(field.related_model)
        elif field.name in SAID and not field.primary_key and not field.choices:
            given[field.name] = SAID[field.name]
        elif not optional and not field.is_relation:
            texts = {models.DateTimeField: Now(), models.JSONField: [], models.CharField: f"{field.name} {number}"}
            given[field.name] = texts.get(kind_of(field), number)
    if issubclass(model, TaskColumns):
        given |= {"status": "ERROR"}
    if issubclass(model, Limit):  # one row for each queue and group
        given |= {"group": f"group {number}"}
    if issubclass(model, AbstractTask):
        given |= {"final_status": "ERROR", "ready_time": None, "watched": True}
    return model._default_manager.create(**given)


def write(row: models.Model, field: Column, value: Any) -> bool:
    """Write a value into a column as another program does; return whether the database took it."""
    put = f"CAST(%s AS {field.db_type(connection)})" if connection.vendor == "postgresql" else "%s"
    if connection.vendor == "postgresql" and isinstance(field, models.BigAutoField | models.ForeignKey):
        return False
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            table, key = row._meta.db_table, row._meta.pk.column
            cursor.execute(f'UPDATE "{table}" SET "{field.column}" = {put} WHERE "{key}" = %s', [value, row.pk])
    except (DatabaseError, OverflowError):
        return False
    return True


def hostile_rows(each: bool) -> Iterator[list[tuple[models.Model, str]]]:
    """Yield rows with hostile values, all at once or by column, and what each holds."""
    found, values = [], ON_SQLITE if connection.vendor == "sqlite" else VALUES
    for model in apps.get_app_config("dbtaskqueue").get_models():
        if model._meta.proxy or isinstance(model._meta.pk, models.CompositePrimaryKey):
            continue
        fields = [field for field in model._meta.concrete_fields if not field.primary_key]
        for kind in values:
            columns = [one for one in fields if kind_of(one) is kind]
            for group in [[one] for one in columns] if each else [columns]:
                for value in values[kind]:
                    row, taken = plain_row(model), 0
                    for field in group:
                        taken += write(row, field, value)
                    if taken:
                        found.append((row, f"{row._meta.model_name}.{group[0].name}… = {value!r:.40}"))
                    else:
                        row.delete()
                if each and found:
                    yield found
                    found = []
    if found:
        yield found


def questions(rows: list[tuple[models.Model, str]]) -> Iterator[tuple[str, str]]:
    """Yield each address and each command of operators: those of all rows, and those of each of these."""
    yield from ((f"/api/{one}", "") for one in LISTS.split())
    yield from ((f"{ADMIN}{model._meta.model_name}/", "") for model in ADMIN_CLASSES)
    yield from (("/metrics", ""), (f"/api/queues/{QUEUE}", ""), (f"{ADMIN}queue/{QUEUE}/change/", ""))
    yield from ((command, "") for command in GLOBAL)
    for row, where in rows:
        name = row._meta.model_name
        if type(row) in ADMIN_CLASSES:
            yield f"{ADMIN}{name}/{quote(row.pk)}/change/", where
        if name in ROUTE_OF:
            yield f"/api/{ROUTE_OF[name]}/{row.pk}", where
        if name in ONE_OF:
            yield f"{ONE_OF[name]} '{row.pk}'", where


def fault_of(browser: Client, question: str) -> str:
    try:
        if question.startswith("/"):
            answer = browser.get(question)
            error = answer.exc_info[1] if getattr(answer, "exc_info", None) else None
            what = f"{answer.status_code} {said(error) if error else answer.content[:200]}"
            return f"{question}: {what}" if answer.status_code >= 500 else ""
        words = [one.strip("'") for one in re.findall(r"'[^']*'|\S+", question)]
        call_command("taskqueue", *words, stdout=io.StringIO(), stderr=io.StringIO(), no_color=True)
    except SystemExit:
        return ""
    except Exception as error:  # a row may be refused in words
        return "" if isinstance(error, CommandError) and "'" in question else f"{question}: {said(error)}"
    return ""


def said(error: BaseException) -> str:
    frames = [one for one in traceback.extract_tb(error.__traceback__) if "django_dbtaskqueue" in one.filename]
    place = f"{frames[-1].filename.rpartition('django_dbtaskqueue/')[2]}:{frames[-1].lineno}" if frames else "?"
    return f"{type(error).__name__}: {error!s:.150} ({place})".replace("\n", " ")


@pytest.fixture
def browser(process_database: ProcessDatabase, settings: Any) -> Client:
    settings.DBTASKQUEUE |= {"QUEUES": {QUEUE: {}}, "OPERATIONS_TIMEOUT": "20s"}
    make_task(Status.ERROR, payload={"a": 1}, process_result="no", fingerprint="f" * 40, reference="honest")
    Queue.objects.create(name=QUEUE)
    Poller.objects.create(instance="p1", state="RUNNING", queues=[QUEUE])
    return logged_in(User.objects.create_superuser("ada"), raise_request_exception=False)


@pytest.mark.slow
@pytest.mark.parametrize("each", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["together", "by column"])
def test_no_row_breaks_a_page_an_answer_or_a_command(browser: Client, each: bool) -> None:
    faults: dict[str, str] = {}
    groups = hostile_rows(each)
    while True:
        with taken_back() if each else transaction.atomic():
            if (rows := next(groups, None)) is None:
                break
            for question, where in questions(rows):
                with taken_back():
                    if fault := fault_of(browser, question):
                        faults.setdefault(re.sub(r"\d+|'[^']*'", "N", fault), f"{fault} <- {where or rows[0][1]}")
    assert not faults, "\n".join(faults.values())


@pytest.mark.usefixtures("taskqueue_registry")
def test_no_row_stops_a_poller_or_delays_another(browser: Client, caplog: pytest.LogCaptureFixture) -> None:
    processor(QUEUE)(lambda task: None)
    assert [*hostile_rows(each=False)]
    child = enqueue(QUEUE, "child", after=enqueue(QUEUE, "parent"))
    Schedule.objects.create(name="honest", queue=QUEUE, cron="* * * * *", next_time=Now(), missed="one")
    order = bulk.start("reprocess", f"queue:{QUEUE} ref:honest", None)
    with run_poller(QUEUE):
        until(Task.objects.filter(status="COMPLETED", reference__startswith="honest@").exists)
        until(Task.objects.filter(status="COMPLETED", pk=child.pk).exists)
        until(BulkOperation.objects.filter(state="FINISHED", pk=order.pk).exists)
        until(lambda: not BulkOperation.objects.filter(state__in=("WAITING", "RUNNING")).exists())
    stopped = [one.getMessage() for one in caplog.records if "fail, trying again" in one.getMessage()]
    assert not stopped, "\n".join(stopped)
