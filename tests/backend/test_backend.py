"""What the backend adds to what every backend promises: ids, retries, one query, looking up instead of importing."""

import signal
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from django.core.exceptions import SuspiciousOperation
from django.db import connection, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from django_dbtaskqueue import enqueue, processor, registry, signals
from django_dbtaskqueue.backend import compat, finished_listener
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.operations.search.query import select
from django_dbtaskqueue.testing import advance, drain, run_poller
from tests.factories import make_task
from tests.operations.site import command, refused
from tests.support import until

pytestmark = pytest.mark.django_db(transaction=True)
BACKEND = "django_dbtaskqueue.backend.DatabaseTaskBackend"


def tasks_setting(**options: Any) -> dict[str, Any]:
    return {"default": {"BACKEND": BACKEND, "QUEUES": ["default", "two"], "OPTIONS": options}}


_before = registry.snapshot()
with override_settings(TASKS=tasks_setting()):  # as the settings of a site are there before its modules
    from tests.testapp import functions
registry.restore(_before)
signals.unregister(finished_listener)


@pytest.fixture(autouse=True)
def site() -> Iterator[None]:
    saved = registry.snapshot()
    with override_settings(TASKS=tasks_setting()):
        yield
    registry.restore(saved)
    signals.unregister(finished_listener)


@pytest.fixture
def ended() -> Iterator[list[Any]]:
    statuses: list[Any] = []

    def note(task_result: Any, **_: Any) -> None:
        statuses.append(task_result.status)

    compat.task_finished.connect(note)
    yield statuses
    compat.task_finished.disconnect(note)


def test_the_row_is_a_task_like_any_other() -> None:
    result = functions.add.using(priority=7, queue_name="two").enqueue(1, b=2)
    row = Task.objects.get()
    assert (row.queue, row.priority, row.max_attempts) == ("two", -7, 1)
    assert (row.payload_type, row.payload) == ("tests.testapp.functions.add", {"args": [1], "kwargs": {"b": 2}})
    assert result.enqueued_at == row.create_time
    assert drain("two").completed == 1


def test_an_id_is_a_uuid_that_begins_with_the_number_of_the_task_and_cannot_be_guessed() -> None:
    result = functions.add.enqueue(1, 2)
    given = uuid.UUID(result.id)
    assert (given.int >> 80, given.version, str(given)) == (Task.objects.get().pk, 8, result.id)
    for bit in range(128):
        guessed = uuid.UUID(int=given.int ^ 1 << bit)
        refused(None, functions.add.get_result, str(guessed), error=compat.TaskResultDoesNotExist)
    assert functions.add.get_result(given).id == result.id  # as a view gets it from <uuid:id>
    with override_settings(SECRET_KEY="a new one"), pytest.raises(compat.TaskResultDoesNotExist):
        functions.add.get_result(result.id)
    with override_settings(SECRET_KEY="a new one", SECRET_KEY_FALLBACKS=["tests"]):
        assert functions.add.get_result(result.id).args == [1, 2]


def test_an_operator_finds_a_task_by_the_id_that_a_program_has() -> None:
    result = functions.add.enqueue(1, 2)
    functions.add.enqueue(3, 4)
    (found,) = select(f"id:{result.id.upper()}", Task.objects.all())
    assert found.payload["args"] == [1, 2]
    assert "tests.testapp.functions.add" in command("show", result.id)
    forged = uuid.UUID(int=uuid.UUID(result.id).int ^ 1)
    refused("is not a whole number", select, f"id:{forged}", Task.objects.all())
    refused("There is no task", command, "show", forged, error=Exception)


@pytest.mark.parametrize("keep", ["keep", "history"])
def test_a_result_is_read_from_a_table_with_column_names_of_its_own(settings: Any, keep: str) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"two": {"model": "testapp.Parcel", "keep": keep}}}
    result = functions.add.using(queue_name="two").enqueue(1, b=2)
    assert functions.add.get_result(result.id).status == "READY"
    make_task(pk=uuid.UUID(result.id).int >> 80)  # the common table has the number, too
    assert "tests.testapp.functions.add" in command("show", result.id)
    assert not select(f"id:{result.id}", Task.objects.all()).exists()
    drain("two")
    result.refresh()
    assert (result.status, result.return_value) == ("SUCCESSFUL", 3)


def test_enqueue_and_get_result_take_one_query_each() -> None:
    functions.add.enqueue(1, 2)  # the first one of a second reads what operators set for the queue
    with transaction.atomic(), CaptureQueriesContext(connection) as queries:
        result = functions.add.enqueue(1, 2)
    assert len([query for query in queries if "dbtaskqueue_queue" not in query["sql"]]) == 1
    with CaptureQueriesContext(connection) as queries:
        result.refresh()
    assert len(queries) == 1


def test_retries_are_said_at_the_function(ended: list[Any]) -> None:
    result, later = functions.succeed_at.enqueue(3), functions.succeed_later.enqueue()
    with run_poller("default"):
        pass
    for one, value in ((result, 3), (later, 2)):
        one.refresh()
        assert (one.status, one.return_value, one.attempts) == (compat.TaskResultStatus.SUCCESSFUL, value, value)
        assert [error.exception_class for error in one.errors] == [LookupError] * (value - 1)
        assert one.enqueued_at < one.started_at < one.last_attempted_at < one.finished_at
        assert len(set(one.worker_ids)) == 1
    assert ended == [compat.TaskResultStatus.SUCCESSFUL] * 2


def test_retries_are_said_in_the_settings() -> None:
    two = {"default": {"max_attempts": 2}}
    for options, queues, attempts in (({}, {}, 1), ({"max_attempts": 4}, two, 4), ({}, two, 2)):
        with override_settings(TASKS=tasks_setting(backoff="fixed:0s", **options), DBTASKQUEUE={"QUEUES": queues}):
            result = functions.fail.enqueue()
            drain("default")
            result.refresh()
        assert (result.status, len(result.errors)) == (compat.TaskResultStatus.FAILED, attempts)


def test_wrong_options_are_told_by_the_checks() -> None:
    for options, told in (
        ({"max_attempts": 0}, "max_attempts=0 must be a whole number of at least 1"),
        ({"attempts": 3}, "has no key 'attempts'"),
        ({"backoff": "sometimes"}, "is not a retry policy"),
    ):
        with override_settings(TASKS=tasks_setting(**options)), pytest.raises(compat.InvalidTaskBackend, match=told):
            compat.task_backends["default"].check()
    cls = compat.task_backends["default"].task_class
    refused("='three' must be a whole", cls, func=functions.fail.func, max_attempts="three", error=compat.InvalidTask)
    assert list(compat.task_backends["default"].check()) == []
    with override_settings(DBTASKQUEUE={"QUEUES": {"two": {"keep": "delete"}}}):
        assert [found.id for found in compat.task_backends["default"].check()] == ["dbtaskqueue.I022"]
    with override_settings(INSTALLED_APPS=[]):
        (found,) = compat.task_backends["default"].check()
    assert (found.id, found.hint) == ("dbtaskqueue.E020", "Add 'django_dbtaskqueue' to INSTALLED_APPS.")


def test_a_row_names_no_code_to_import() -> None:
    result = functions.add.enqueue(1, 2)
    Task.objects.update(payload_type="subprocess.check_output")
    refused("no @task of this process has that path", result.refresh, error=SuspiciousOperation)
    assert drain("default").completed == 0  # it is left to a poller that knows it
    assert Task.objects.get().status == "CREATED"


def test_a_payload_that_no_enqueue_wrote_fails_its_task_alone() -> None:
    result = functions.add.enqueue(3, 4)
    for payload in (None, [], {"args": 1, "kwargs": {}}, {"args": []}, "x"):
        functions.add.enqueue(1, 2)
        Task.objects.filter(pk=Task.objects.latest("pk").pk).update(payload=payload)
    assert drain("default").completed == 1
    result.refresh()
    assert result.return_value == 7
    assert Task.objects.filter(status="ERROR", process_result__contains="The payload of a Django task is").count() == 5


def test_plain_rows_and_functions_of_a_queue_keep_apart() -> None:
    seen: list[Any] = []
    processor("default")(lambda task: seen.append(task.payload))
    functions.add.enqueue(1, 2)
    enqueue("default", payload=[3])
    assert drain("default").completed == 2 and seen == [[3]]
    functions.add.using(queue_name="two").enqueue(1, 2)
    registry.unregister("two")
    enqueue("two", payload={"args": [1, 2], "kwargs": {}})
    drain("two")
    assert sorted(Task.objects.filter(queue="two").values_list("status", flat=True)) == ["COMPLETED", "CREATED"]


def test_an_operator_moves_changes_and_cancels() -> None:
    moved, dear, cancelled = (functions.add.enqueue(1, number) for number in range(3))
    ids = [uuid.UUID(result.id).int >> 80 for result in (moved, dear, cancelled)]
    Task.objects.filter(pk=ids[1]).update(priority=-5000)
    assert Task.objects.filter(pk=ids[2]).cancel() == 1
    for result in (moved, dear, cancelled):
        result.refresh()
    assert functions.add.get_result(dear.id).task.priority == 100
    assert (cancelled.status, cancelled.errors, cancelled.attempts) == (compat.TaskResultStatus.FAILED, [], 0)
    Task.objects.filter(pk=ids[0]).update(queue="elsewhere")
    assert functions.add.get_result(moved.id).task.queue_name == "default"  # no queue of this backend


def test_an_interrupt_ends_the_process_and_the_task_is_not_lost(request: pytest.FixtureRequest) -> None:
    # Whoever starts the tests in the background has them ignore Ctrl-C, and so every interrupt
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    result = functions.interrupt.enqueue()
    with pytest.raises(KeyboardInterrupt), run_poller("default"):
        until(lambda: False)
    result.refresh()
    assert (result.status, result.errors) == (compat.TaskResultStatus.READY, [])
    advance("1m")
    refused(None, drain, "default", error=KeyboardInterrupt)  # without a poller it is the caller's own


def test_outcomes_of_the_queue_are_obeyed_and_poison_is_a_failure(ended: list[Any]) -> None:
    again, refused = functions.once_more.enqueue("again"), functions.refuse.enqueue()
    assert str(drain("default")) == "1 completed, 1 reenqueued, 1 poisoned"
    for result in (again, refused):
        result.refresh()
    assert (again.return_value, refused.status, refused.attempts) == ("again", compat.TaskResultStatus.FAILED, 1)
    assert sorted(ended) == [compat.TaskResultStatus.FAILED, compat.TaskResultStatus.SUCCESSFUL]
