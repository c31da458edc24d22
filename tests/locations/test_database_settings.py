"""A site of each kind of database settings: a view enqueues, a poller works, and the result is there."""

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path

from django_dbtaskqueue import enqueue, registry
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.testing import run_poller
from tests.conftest import _as_default

SITES: dict[str, dict[str, Any]] = {
    "as Django makes it": {},
    "atomic requests": {"ATOMIC_REQUESTS": True},
    "no autocommit": {"AUTOCOMMIT": False},
    "persistent and checked": {"CONN_MAX_AGE": None, "CONN_HEALTH_CHECKS": True},
    "bound by the server": {"OPTIONS": {"server_side_binding": True}},
    "serializable": {"OPTIONS": {"options": "-c default_transaction_isolation=serializable"}},
    "cursors of its own": {"ENGINE": "tests.locations.schema_backend"},
}


def order(request: HttpRequest) -> HttpResponse:
    with transaction.atomic():
        task = enqueue("orders", payload={"price": "1.10"})
    commit()
    return HttpResponse(task.pk)


def commit() -> None:
    """Do what a site without autocommit has to do itself."""
    if not connection.in_atomic_block and not transaction.get_autocommit():
        transaction.commit()


urlpatterns = [path("order", order)]


@pytest.fixture(params=SITES)
def site(request: Any, postgres_process_database: Any, settings: Any, django_db_blocker: Any) -> Iterator[None]:
    """Replace what is given, in the settings of the default database."""
    settings.ROOT_URLCONF = __name__
    with _as_default(postgres_process_database, django_db_blocker):
        default, wanted = connections.settings["default"], SITES[request.param]
        default |= {**wanted, "OPTIONS": default["OPTIONS"] | wanted.get("OPTIONS", {})}
        yield


@pytest.mark.parametrize("use_tz", [True, False], ids=["", "without time zones"])
@pytest.mark.usefixtures("site", "taskqueue_registry")
def test_a_view_enqueues_and_a_poller_works(settings: Any, use_tz: bool) -> None:
    settings.USE_TZ = use_tz
    settings.DBTASKQUEUE = {"QUEUES": {"orders": {}}}

    @registry.processor("orders")
    def invoice(task: Lease) -> Any:
        if task.reference is None:
            enqueue("orders", "second", payload=task.payload)
            commit()
        return task.payload

    assert Client().post("/order").status_code == 200
    with run_poller("orders"):
        pass
    assert list(Task.objects.values_list("status", "result")) == [("COMPLETED", {"price": "1.10"})] * 2
