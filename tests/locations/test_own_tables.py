"""A task table of the project's own, as its users and operators meet it: pages, values of its columns, lists."""

import io
import json
from datetime import UTC, datetime, time, timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.core.management import call_command
from django.test import Client
from django.urls import include, path

from django_dbtaskqueue import DuplicateTask, enqueue, enqueue_many, queue
from django_dbtaskqueue.core.exceptions import EnqueueError
from django_dbtaskqueue.flow.placement import OwnValueEncoder
from django_dbtaskqueue.operations import lookup
from django_dbtaskqueue.operations.queue_stats import overview
from tests.flow.conftest import alias as alias
from tests.operations.test_admin import confirm, post
from tests.testapp.models import Parcel

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"])
urlpatterns = [path("api/", include("django_dbtaskqueue.api.urls")), path("admin/", admin.site.urls)]


@pytest.fixture(autouse=True)
def _settings(settings: Any) -> None:
    settings.ROOT_URLCONF = __name__
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {"model": "testapp.Parcel"}, "usual": {}}, "API": True}


def test_an_own_table_has_its_pages_without_a_line_of_the_project(admin_client: Client) -> None:
    task = enqueue("parcels", "p1", {"to": "Berlin"}, columns={"weight": 7})
    table, page = "/admin/testapp/parcel/", f"/admin/testapp/parcel/{task.pk}/change/"
    assert f"{table}?q=queue%3Aparcels" in admin_client.get("/admin/dbtaskqueue/overview/").content.decode()
    assert page in admin_client.get(f"{table}?q=queue:parcels").content.decode()
    shown = admin_client.get(page).content.decode()
    assert "p1" in shown and "weight" in shown and ">7<" in shown
    assert post(admin_client, "cancel", [task], url=table).status_code == 200, "it asks"
    confirm(admin_client, "cancel", [task], url=table)
    assert Parcel.objects.get().status == "POISON"


def test_a_page_of_the_projects_own_stays() -> None:
    from django_dbtaskqueue.admin import TaskAdmin, register

    class ParcelAdmin(TaskAdmin):
        """The project's own."""

    site = admin.AdminSite()
    site.register(Parcel, ParcelAdmin)
    register(site)
    assert type(site.get_model_admin(Parcel)) is ParcelAdmin


def test_values_of_own_columns_are_stored_with_the_task(alias: str) -> None:
    task = enqueue("parcels", "p1", columns={"weight": 3}, using=alias)
    assert isinstance(task, Parcel) and task.weight == 3
    stored = Parcel.objects.using(alias)
    assert stored.get(pk=task.pk).weight == 3
    assert enqueue("parcels", "p2", using=alias) and stored.get(reference="p2").weight == 1
    enqueue("parcels", "p1", columns={"weight": 4}, on_duplicate="replace", using=alias)
    with pytest.raises(DuplicateTask):
        enqueue("parcels", "p1", columns={"weight": 5}, using=alias)
    assert stored.get(pk=task.pk).weight == 4


def test_many_tasks_with_and_without_own_values(alias: str) -> None:
    items = [{"reference": f"p{n}", "columns": {"weight": n}} if n % 2 else {"reference": f"p{n}"} for n in range(6)]
    assert enqueue_many("parcels", items, using=alias).enqueued == 6
    weights = dict(Parcel.objects.using(alias).values_list("reference", "weight"))
    assert weights == {"p0": 1, "p1": 1, "p2": 1, "p3": 3, "p4": 1, "p5": 5}
    changed = [{"reference": "p3", "columns": {"weight": 9}}]
    again = enqueue_many("parcels", changed, on_duplicate="replace", using=alias)
    assert (again.enqueued, again.replaced) == (0, 1)
    assert Parcel.objects.using(alias).get(reference="p3").weight == 9


def test_a_time_in_an_own_column_keeps_its_microseconds() -> None:
    for value in (datetime(2026, 1, 31, 5, 0, 0, 123456, tzinfo=UTC), time(5, 0, 0, 123456)):
        assert json.loads(json.dumps(value, cls=OwnValueEncoder)) == value.isoformat()


NO_COLUMNS: list[tuple[str, Any, str]] = [
    ("parcels", {"wieght": 1}, r"Did you mean 'weight'\?"),
    ("parcels", {"status": "COMPLETED"}, "no own field 'status'"),
    ("parcels", {"weight": "heavy"}, "weight='heavy' cannot be stored"),
    ("parcels", ["weight"], "must be a mapping"),
    ("usual", {"weight": 1}, "the setting model"),
]


def test_what_is_no_own_column_is_refused() -> None:
    for name, columns, words in NO_COLUMNS:
        with pytest.raises(EnqueueError, match=words):
            enqueue(name, columns=columns)
    assert not Parcel.objects.exists()


def test_a_queue_made_at_runtime_is_in_every_list(admin_client: Client) -> None:
    queue("fresh").create(lease=timedelta(minutes=2))
    assert lookup.count_by_status()["fresh"]["CREATED"] == 0
    assert "fresh" in [row.queue for row in overview().queues]
    out = io.StringIO()
    call_command("taskqueue", "status", stdout=out, no_color=True)
    assert "fresh" in out.getvalue()
    assert "fresh" in [one["queue"] for one in admin_client.get("/api/queues").json()["queues"]]
    assert admin_client.get("/api/queues/fresh").status_code == 200
    for page in ("overview", "queue", "task"):
        assert "fresh" in admin_client.get(f"/admin/dbtaskqueue/{page}/").content.decode(), page
