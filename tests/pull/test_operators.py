"""Operators' questions and verbs as functions: by business key, by filter, by queue."""

from typing import Any

import pytest
from django.db.models.functions import Now

from django_dbtaskqueue import LeaseLost, UnknownQueue, enqueue, queue
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.models import Task, TemporaryTask
from django_dbtaskqueue.operations import lookup
from tests.factories import age, make_task
from tests.operations.site import refused
from tests.pull.conftest import HOUR

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"])


@pytest.fixture(params=["default", "sqlite"], ids=["postgresql", "sqlite"], autouse=True)
def alias(request: pytest.FixtureRequest, settings: Any) -> str:
    queues: dict[str, Any] = {"mail": {}, "other": {}, "scratch": {"temporary": True}}
    settings.DBTASKQUEUE = {"DATABASE": request.param, "QUEUES": queues}
    if request.param == "sqlite":
        # The site's router would say so where Task is asked for without a queue.
        settings.DATABASE_ROUTERS = ["tests.pull.test_operators.ToSqlite"]
    return str(request.param)


class ToSqlite:
    db_for_read = db_for_write = staticmethod(lambda model, **hints: "sqlite")


def make(status: str, alias: str, **columns: Any) -> Task:
    return make_task(status, using=alias, **{"queue": "mail", **columns})


def test_exists_find_and_delete_also_in_a_queue_s_own_table(alias: str) -> None:
    task = enqueue("mail", "r-1", {"a": 1})
    assert lookup.exists("mail", "r-1") and not lookup.exists("other", "r-1")
    found = lookup.find("mail", "r-1")
    assert found is not None and (found.pk, found.payload) == (task.pk, {"a": 1})
    assert lookup.find("mail", "r-2") is lookup.find("scratch", "r-1") is None
    task, found = enqueue("scratch", "r-1"), lookup.find("scratch", "r-1")
    assert isinstance(found, TemporaryTask) and found.pk == task.pk
    assert lookup.delete("scratch", "r-1")
    assert not TemporaryTask.objects.using(alias).exists()


def test_a_reference_that_is_not_there_is_said_and_a_deleted_task_is_its_holder_s_no_more() -> None:
    verbs = (lookup.reprocess, lookup.run_now, lookup.cancel, lookup.delete)
    assert [verb("mail", "unknown") for verb in verbs] == [False] * 4
    enqueue("mail", "held")
    held = queue("mail").take()
    assert lookup.delete("mail", "held")
    refused(None, held.complete, error=LeaseLost)


def test_run_now_of_a_selection_leaves_tasks_without_a_processor_parked(alias: str) -> None:
    enqueue("mail", "later", delay=HOUR)
    enqueue("mail", "first of its group", group="g", delay=HOUR)
    enqueue("mail", "second", group="g", delay=HOUR)
    parked = make("CREATED", alias, reference="parked", parked_by="no handler for payload type x", ready_time=None)
    assert lookup.search("mail").run_now() == 3
    assert [queue("mail").take().reference for _ in range(2)] == ["later", "first of its group"]
    assert queue("mail").take() is None
    assert Task.objects.using(alias).get(pk=parked.pk).parked_by


def test_an_unknown_queue_is_no_empty_one_and_no_reference_is_not_that_of_all_without_one() -> None:
    enqueue("mail")
    for verb in (lookup.exists, lookup.find, lookup.reprocess, lookup.run_now, lookup.cancel, lookup.delete):
        refused("Did you mean 'mail'", verb, "mial", "r-1", error=UnknownQueue)
        refused("A reference is text, not None", verb, "mail", None, error=TypeError)
    for ask in (lookup.search, lookup.count_by_status):
        refused(None, ask, "mial", error=UnknownQueue)


def test_search_by_everything(alias: str) -> None:
    old = make("ERROR", alias, reference="r-1")
    age(2 * HOUR, using=alias)
    old.refresh_from_db(using=alias)
    new, done = make("ERROR", alias, reference="r-2"), make("COMPLETED", alias)
    other = make("ERROR", alias, queue="other", reference="r-1")
    hour_ago = Task.objects.using(alias).values_list(Now() - HOUR, flat=True)[0]
    for queues, given, found in (
        (["mail"], {}, [done, new, old]),
        ([], {"status": "ERROR"}, [other, new, old]),
        (["mail"], {"status": "ERROR", "created_after": hour_ago}, [new]),
        (["mail"], {"created_before": hour_ago}, [old]),
        (["mail"], {"created_before": old.create_time}, []),
        ([], {"reference": "r-1"}, [other, old]),
        (["other"], {"status": "POISON"}, []),
    ):
        assert list(lookup.search(*queues, **given)) == found  # type: ignore[arg-type]
    refused("not a status", lookup.search, status="DONE", error=ValueError)


def test_count_by_queue_and_status(alias: str) -> None:
    make("ERROR", alias)
    make("ERROR", alias)
    make("CREATED", alias, queue="other")
    queue("sites").create()
    enqueue("sites")
    enqueue("scratch")
    none = dict.fromkeys(map(str, Status), 0)
    failed, created = {**none, "ERROR": 2}, {**none, "CREATED": 1}
    assert lookup.count_by_status("mail") == {"mail": failed}
    expected = {"mail": failed, "other": created, "sites": created, "scratch": created}
    assert expected.items() <= lookup.count_by_status().items()


def test_over_shards(settings: Any) -> None:
    settings.DATABASE_ROUTERS = []
    settings.DBTASKQUEUE = {"QUEUES": {"mail": {"shards": ["default", "sqlite"]}}}
    references = [enqueue("mail", f"r-{n}").reference for n in range(8)]
    assert all(lookup.exists("mail", reference) for reference in references)
    assert lookup.count_by_status("mail")["mail"]["CREATED"] == 8
    refused("has shards", lookup.search, "mail")
    assert sum(lookup.search("mail", using=shard).cancel() for shard in ("default", "sqlite")) == 8
    assert all(lookup.delete("mail", reference) for reference in references)
