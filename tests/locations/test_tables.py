"""Queues with a table of their own: the flow, its columns, its pages under any name; and temporary queues."""

import json
from datetime import UTC, datetime, time, timedelta
from typing import Any

import pytest
from django.apps import apps
from django.contrib import admin
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, models
from django.test import Client

from django_dbtaskqueue import DuplicateTask, LeaseLost, enqueue, enqueue_many, queue, registry
from django_dbtaskqueue.admin import TaskAdmin, register
from django_dbtaskqueue.core.exceptions import EnqueueError
from django_dbtaskqueue.db.session import model_named
from django_dbtaskqueue.flow.placement import OwnValueEncoder
from django_dbtaskqueue.models import AbstractTask, Attempt, Step, Task, TaskHistory, TemporaryTask
from django_dbtaskqueue.operations import lookup
from django_dbtaskqueue.operations.actions import enqueue_copy
from django_dbtaskqueue.operations.housekeeping import Housekeeper, RetentionPolicy
from django_dbtaskqueue.operations.queue_stats import overview
from django_dbtaskqueue.testing import run_poller
from tests.flow.conftest import alias as alias
from tests.operations.site import command, page, refused
from tests.operations.test_admin import confirm, post
from tests.support import sql
from tests.testapp.models import Booking, Parcel

LOCATION = "testapp.parcel"
pytestmark = pytest.mark.django_db(databases=["default", "sqlite"])


@pytest.fixture(autouse=True)
def own_table(settings: Any, taskqueue_registry: None) -> None:
    """The queue ``parcels`` lives in ``Parcel``; ``fleeting`` is temporary."""
    own = {"model": "testapp.Parcel"}
    queues = {"parcels": own, "archived": {**own, "keep": "history"}, "fleeting": {"temporary": True}, "usual": {}}
    settings.DBTASKQUEUE = {"QUEUES": queues, "API": True}
    settings.ROOT_URLCONF = "tests.operations.site"


def parcels(alias: str) -> Any:
    return Parcel.objects.db_manager(alias)


def test_the_whole_road_in_a_table_of_ones_own(alias: str) -> None:
    task = enqueue("archived", "p1", {"to": "Berlin"}, using=alias)
    assert isinstance(task, Parcel) and (task.reference, task.weight) == ("p1", 1)
    assert not Task.objects.using(alias).exists()
    first = parcels(alias).checkout("archived", poller_instance="a")[0]
    first.fail("dropped", delay=timedelta(0))
    second = parcels(alias).checkout("archived", poller_instance="b")[0]
    refused(None, first.complete, error=LeaseLost)
    second.complete("delivered")
    moved = TaskHistory.objects.using(alias).get()
    assert (moved.task_id, moved.reference, moved.result, moved.location) == (task.pk, "p1", "delivered", LOCATION)
    attempt = Attempt.objects.using(alias).get()
    assert (attempt.location, attempt.task_id) == (LOCATION, task.pk)


def test_verbs_groups_and_history_work_there(alias: str) -> None:
    enqueue_many("parcels", ({"reference": f"p{n}", "group": "van"} for n in range(3)), using=alias)
    with pytest.raises(DuplicateTask):
        enqueue("parcels", "p0", using=alias)
    head = parcels(alias).checkout("parcels", poller_instance="a", limit=5)
    assert [lease.reference for lease in head] == ["p0"]
    head[0].fail("lost", retry=False)
    assert (parcels(alias).mark_poison(), parcels(alias).kick(5), parcels(alias).cancel()) == (1, 1, 3)
    assert parcels(alias).housekeep(older_than=timedelta(0)) == 3
    assert set(TaskHistory.objects.using(alias).values_list("location", flat=True)) == {LOCATION}


def test_housekeeping_of_one_table_leaves_the_steps_of_another(alias: str) -> None:
    task = enqueue("usual", using=alias)
    [lease] = Task.objects.db_manager(alias).checkout("usual", poller_instance="a")
    lease.step("weigh", lambda: 7)
    Housekeeper().turn(RetentionPolicy(), using=alias)
    assert Step.objects.using(alias).get().task_id == task.pk


@pytest.mark.django_db(databases=["default", "sqlite"], transaction=True)
def test_one_poller_serves_queues_of_several_tables(alias: str) -> None:
    tables = {"parcels": Parcel, "fleeting": TemporaryTask, "usual": Task}
    for name in tables:
        registry.register(name, lambda task: task.queue)
        enqueue(name, "r", using=alias)
    with run_poller(*tables, using=alias):
        pass
    ended = {queue: model._default_manager.using(alias).get() for queue, model in tables.items()}
    assert {queue: (task.status, task.result) for queue, task in ended.items()} == {q: ("COMPLETED", q) for q in tables}


def test_a_temporary_queue_is_unlogged_and_an_ordinary_one_is_not() -> None:
    enqueue("fleeting", "r")
    found = sql("SELECT relname, relpersistence FROM pg_class WHERE relname ~ '^dbtaskqueue_(temporary)?task$'")
    assert dict(found) == {"dbtaskqueue_task": "p", "dbtaskqueue_temporarytask": "u"}


def test_names_that_would_need_quoting_are_an_error_and_never_stripped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Parcel._meta, "db_table", 'parcel"; DROP TABLE x')
    model_named.cache_clear()
    with pytest.raises(ImproperlyConfigured, match="cannot be a table's or column's name"):
        model_named("testapp.Parcel")
    model_named.cache_clear()


def test_an_own_table_has_its_pages_without_a_line_of_the_project(admin_client: Client) -> None:
    task, table = enqueue("parcels", "p1", {"to": "Berlin"}, columns={"weight": 7}), "/admin/testapp/parcel/"
    assert f"{table}?q=queue%3Aparcels" in page(admin_client, "/admin/dbtaskqueue/overview/")
    assert f"{table}{task.pk}/change/" in page(admin_client, table, q="queue:parcels")
    shown = page(admin_client, f"{table}{task.pk}/change/")
    assert "p1" in shown and "weight" in shown and ">7<" in shown
    assert post(admin_client, "cancel", [task], url=table).status_code == 200, "it asks"
    confirm(admin_client, "cancel", [task], url=table)
    assert Parcel.objects.get().status == "POISON"


def test_a_page_of_the_projects_own_stays() -> None:
    class ParcelAdmin(TaskAdmin):
        """The project's own."""

    site = admin.AdminSite()
    site.register(Parcel, ParcelAdmin)
    register(site)
    assert type(site.get_model_admin(Parcel)) is ParcelAdmin


def test_values_of_own_columns_are_stored_with_the_task(alias: str) -> None:
    task = enqueue("parcels", "p1", columns={"weight": 3}, using=alias)
    assert isinstance(task, Parcel) and task.weight == 3
    stored = parcels(alias)
    assert stored.get(pk=task.pk).weight == 3
    assert enqueue("parcels", "p2", using=alias) and stored.get(reference="p2").weight == 1
    enqueue("parcels", "p1", columns={"weight": 4}, on_duplicate="replace", using=alias)
    with pytest.raises(DuplicateTask):
        enqueue("parcels", "p1", columns={"weight": 5}, using=alias)
    assert stored.get(pk=task.pk).weight == 4


def test_many_tasks_with_and_without_own_values(alias: str) -> None:
    items = [{"reference": f"p{n}", "columns": {"weight": n}} if n % 2 else {"reference": f"p{n}"} for n in range(6)]
    assert enqueue_many("parcels", items, using=alias).enqueued == 6
    weights = dict(parcels(alias).values_list("reference", "weight"))
    assert weights == {"p0": 1, "p1": 1, "p2": 1, "p3": 3, "p4": 1, "p5": 5}
    changed = [{"reference": "p3", "columns": {"weight": 9}}]
    again = enqueue_many("parcels", changed, on_duplicate="replace", using=alias)
    assert (again.enqueued, again.replaced) == (0, 1)
    assert parcels(alias).get(reference="p3").weight == 9


def test_a_value_that_no_own_column_can_hold_is_rejected_alone(alias: str) -> None:
    for value in ("heavy", 2**70, None):
        items = [{"columns": {"weight": one}} for one in (3, value, 5)]
        with pytest.raises(EnqueueError, match=rf"^items\[1\]: columns: weight={value!r} cannot be stored"):
            enqueue_many("parcels", items, using=alias)
        report = enqueue_many("parcels", items, on_invalid="reject", using=alias)
        assert (report.enqueued, [one.index for one in report.rejections]) == (2, [1])


def test_a_time_in_an_own_column_keeps_its_microseconds() -> None:
    for value in (datetime(2026, 1, 31, 5, 0, 0, 123456, tzinfo=UTC), time(5, 0, 0, 123456)):
        assert json.loads(json.dumps(value, cls=OwnValueEncoder)) == value.isoformat()


@pytest.mark.django_db(databases=["default", "sqlite"], transaction=True)
def test_each_value_fits_its_own_column_and_a_copy_leaves_what_the_database_generates(
    alias: str, settings: Any
) -> None:
    class Crate(AbstractTask):
        weight = models.IntegerField(db_default=1)
        label = models.CharField(max_length=5, null=True, unique=True)  # noqa: DJ001 -- unique where there is one
        home = models.ForeignKey(Booking, models.DO_NOTHING, null=True, related_name="+")
        facts = models.JSONField(null=True)
        twice = models.GeneratedField(
            expression=models.F("weight") * 2, output_field=models.IntegerField(), db_persist=True
        )

        class Meta(AbstractTask.Meta):
            app_label = "testapp"

    settings.DBTASKQUEUE = {"QUEUES": {"crates": {"model": "testapp.Crate", "database": alias}}}
    with connections[alias].schema_editor() as editor:
        editor.create_model(Crate)
    try:
        for label, words in (("longer", "6 characters, and the column 5"), ("a\0b", "no NUL")):
            with pytest.raises(EnqueueError, match=f"label=.* cannot be stored: .*{words}"):
                enqueue("crates", columns={"weight": 4, "label": label})
        enqueue("crates", columns={"weight": 4})
        enqueue_copy(Crate.objects.using(alias).get())
        assert list(Crate.objects.using(alias).values_list("weight", "twice")) == [(4, 8), (4, 8)]
        home = Booking.objects.using(alias).create(reference="home")
        good = {"home": home, "facts": {"at": [1.5, None]}}
        bad = [{"home": 10**6}, {"facts": {"a": "\0"}}, {"facts": {1, 2}}, {"label": "same"}, {"label": "same"}]
        items = [{"reference": f"r{n}", "columns": one} for n, one in enumerate([good, *bad, {"home": home.pk}])]
        report = enqueue_many("crates", [*items, {"reference": "r7"}], on_invalid="reject")
        assert report.enqueued == 4 and [one.reference for one in report.rejections] == ["r1", "r2", "r3", "r5"]
        assert [type(one.error) for one in report.rejections] == [EnqueueError] * 4
        assert Crate.objects.using(alias).get(reference="r0").facts == good["facts"]
    finally:
        with connections[alias].schema_editor() as editor:
            editor.delete_model(Crate)
        apps.all_models["testapp"].pop("crate")
        apps.clear_cache()


def test_what_is_no_own_column_is_refused() -> None:
    wrong: list[tuple[str, Any, str]] = [
        ("parcels", {"wieght": 1}, r"Did you mean 'weight'\?"),
        ("parcels", {"status": "COMPLETED"}, "no own field 'status'"),
        ("parcels", {"weight": "heavy"}, "weight='heavy' cannot be stored"),
        *(("parcels", ["weight"], "must be a mapping"), ("usual", {"weight": 1}, "the setting model")),
    ]
    for name, columns, words in wrong:
        with pytest.raises(EnqueueError, match=words):
            enqueue(name, columns=columns)
    assert not Parcel.objects.exists()


def test_a_queue_made_at_runtime_is_in_every_list(admin_client: Client) -> None:
    queue("fresh").create(lease=timedelta(minutes=2))
    assert lookup.count_by_status()["fresh"]["CREATED"] == 0
    assert "fresh" in [row.queue for row in overview().queues] and "fresh" in command("status")
    assert "fresh" in [one["queue"] for one in admin_client.get("/api/queues").json()["queues"]]
    assert admin_client.get("/api/queues/fresh").status_code == 200
    for name in ("overview", "queue", "task"):
        assert "fresh" in page(admin_client, f"/admin/dbtaskqueue/{name}/"), name
