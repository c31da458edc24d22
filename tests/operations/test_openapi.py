"""The API describes itself: the document is valid, each route answers as it says, and nothing else is there."""

import hashlib
import re
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import include, path
from django.utils import timezone
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from django_dbtaskqueue.api.urls import ROUTES
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.models import ApiToken, AuditEntry, BulkOperation, MinuteCount, Poller, Queue
from django_dbtaskqueue.models.control import UNFINISHED
from django_dbtaskqueue.operations import bulk
from django_dbtaskqueue.operations.permissions import PAUSE, Actor, Scope
from django_dbtaskqueue.operations.queue_control import pause
from django_dbtaskqueue.operations.schedules import add_schedule
from tests.factories import QUEUE, make_task
from tests.operations.site import attempt, data, failure_group, logged_in
from tests.support import taken_back

urlpatterns = [path("here/api/", include("django_dbtaskqueue.api.urls"))]
ROOT, FINGERPRINT = "/here/api", "f" * 40
# What each POST is sent; a route without an entry here fails.
WITH_A_REASON = "cancel_operation", "put_back_operation", "command_poller", "act_on_schedule"
BODIES: dict[str, dict[str, Any]] = {
    **{name: {"reason": "why"} for name in WITH_A_REASON},
    "act_on_task_ids": {"ids": [1, 2], "reason": "why"},
    "preview_search": {"q": "status:ERROR"},
    "act_on_search": {"q": "status:ERROR", "reason": "why", "limit": 5},
    "act_on_queue": {"reason": "why", "for": "30m"},
    "change_queue_settings": {"values": {"batch_size": 7, "lease": "5m"}, "reset": ["ttl"]},
    "purge_queue": {"confirm": QUEUE, "reason": "why"},
    "make_schedule": {"queue": QUEUE, "cron": "0 7 * * *", "reason": "why"},
    "change_schedule": {"cron": "0 8 * * *", "priority": -1, "payload": {"n": 1}},
}
QUERIES = {"tasks": {"q": "status:ERROR", "limit": "1"}, "trend": {"since": "2h"}, "status": {"queue": QUEUE}}


@pytest.fixture(autouse=True)
def _here(settings: Any) -> None:
    settings.ROOT_URLCONF = __name__
    settings.DBTASKQUEUE |= {"QUEUES": {QUEUE: {}}}


@pytest.fixture
def ada() -> Client:
    return logged_in(User.objects.create_superuser("ada"))


def post(client: Client, where: str, **body: Any) -> Any:
    return client.post(f"{ROOT}/{where}", body, content_type="application/json")


@pytest.fixture
def parts() -> dict[str, Any]:
    """Make one of everything; return what stands for each part of an address."""
    task = make_task(Status.ERROR, fingerprint=FINGERPRINT, payload={"n": 1}, process_result="ValueError: no")
    make_task(Status.ERROR)
    attempt(task, error_type="ValueError", message="no", traceback="no")
    Poller.objects.create(instance="host:1/2", state="RUNNING", queues=[QUEUE, {"queue": "letters", "weight": 2}])
    failure_group(FINGERPRINT, message="password=hunter2")
    for kind, name in (("failure", FINGERPRINT), ("outcome", "completed")):
        MinuteCount.objects.create(kind=kind, queue=QUEUE, minute=task.create_time, name=name, count=3, runs={"5": 3})
    pause(QUEUE, "default", by="ada", reason="why")
    operation = bulk.start("reprocess", "status:ERROR", None)
    add_schedule("nightly", {"queue": QUEUE, "cron": "0 3 * * *"}, Actor())
    make_task(Status.ERROR, reference="undone")
    ended = bulk.start("mark_poison", "ref:undone", None)
    while ended.state in UNFINISHED:
        bulk.step(ended)
    same = {"queue": QUEUE, "poller": "host:1/2", "command": "drain", "action": "pause", "fingerprint": FINGERPRINT}
    return {
        **same,
        "verb": {"act_on_task_ids": "reprocess", "act_on_queue": "pause"},
        "pk": {"operation": operation.pk, "task": task.pk, "put_back_operation": ended.pk},
        "schedule": {"schedule": "nightly", "make_schedule": "a new one"},
    }


def value_of(value: Any, route: str) -> Any:
    """Return what stands for a part in the address of a route: its own, or that of the first route."""
    return value.get(route, next(iter(value.values()))) if isinstance(value, dict) else value


def test_the_document_is_valid_has_every_route_and_needs_no_login() -> None:
    found = Client().get(f"{ROOT}/openapi.json").json()
    validate(found)
    assert found["openapi"].startswith("3.1") and found["servers"] == [{"url": ROOT}]
    described = [one for operations in found["paths"].values() for one in operations.values()]
    assert all(one["summary"] for one in described)
    assert sorted(one["operationId"] for one in described) == sorted(route.name for route in ROUTES)


def test_each_route_answers_as_its_schema_says(ada: Client, parts: dict[str, Any]) -> None:
    found = ada.get(f"{ROOT}/openapi.json").json()
    every = [(where, *one) for where, operations in found["paths"].items() for one in operations.items()]
    for address, method, described in every:
        name = described["operationId"]
        for parameter in described["parameters"]:
            if parameter["in"] == "path":
                value = value_of(parts[parameter["name"]], name)
                Draft202012Validator(parameter["schema"]).validate(value)
                address = address.replace(f"{{{parameter['name']}}}", str(value))
        with taken_back():
            if method == "get":
                answer = ada.get(ROOT + address, QUERIES.get(name, {}))
            else:
                check(found, described["requestBody"]["content"]["application/json"]["schema"], BODIES[name])
                answer = post(ada, address.removeprefix("/"), **BODIES[name])
        (good,) = [code for code in described["responses"] if code.startswith("2")]
        assert str(answer.status_code) == good, (name, answer.content)
        check(found, described["responses"][good]["content"]["application/json"]["schema"], answer.json())
        assert answer.json() not in ({}, []), name


def check(found: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    Draft202012Validator({**schema, "components": found["components"]}).validate(value)


def test_what_is_not_there_and_a_wrong_method_answer_json(ada: Client, parts: dict[str, Any]) -> None:
    for where in ("", "/", "/nothing", "/tasks/", "/tasks/abc", "/tasks/1/2/3", "/queues/nosuch"):
        answer = ada.get(ROOT + "/" + where.removeprefix("/"))
        assert (answer.status_code, list(answer.json())) == (404, ["error"]), where
    for where in ("host:1/3/drain", "host:1/2/explode"):
        assert post(ada, f"pollers/{where}").status_code == 404
    """Each method comes in turn."""
    for turn, route in enumerate(ROUTES):
        methods = ("get", "post", "put", "patch", "delete", "options", "head")
        wrong = [one for one in methods if one != route.method.lower()]
        for method in (wrong[turn % len(wrong)], wrong[(turn + 3) % len(wrong)]):
            answer = getattr(ada, method)(f"{ROOT}/{address_of(route, parts)}")
            assert (answer.status_code, answer.headers["Allow"]) == (405, route.method), route
            assert method == "head" or "error" in answer.json()


def address_of(route: Any, parts: dict[str, Any]) -> str:
    address = route.path
    for part, value in parts.items():
        address = re.sub(rf"<\w+:{part}>", str(value_of(value, route.name)), address)
    return address


def test_the_figures_are_those_of_the_command_line_and_lists_go_on(ada: Client, parts: dict[str, Any]) -> None:
    printed = data("status")
    assert {**ada.get(f"{ROOT}/status").json(), "as_of": ""} == {**printed, "as_of": ""}
    assert ada.get(f"{ROOT}/health").json() == printed["health"]
    assert ada.get(f"{ROOT}/doctor").json()["findings"] == data("doctor")
    first = ada.get(f"{ROOT}/operations", {"limit": 1}).json()
    rest = ada.get(f"{ROOT}/operations", {"limit": 1, "before": first["before"]}).json()
    ids = [one["id"] for found in (first, rest) for one in found["operations"]]
    assert (ids, rest["before"]) == (sorted(BulkOperation.objects.values_list("pk", flat=True))[::-1], None)


def test_settings_are_changed_within_what_a_row_may_say(ada: Client, parts: dict[str, Any]) -> None:
    where = f"queues/{QUEUE}/settings"
    post(ada, where, values={"lease": "5m", "concurrency": None})
    assert Queue.objects.get().overrides == {"lease": "PT5M", "concurrency": None}, "none is a value, too"
    for name, given in (("router", {"values": {"router": "os.system"}}), ("lase", {"reset": ["lase"]})):
        answer = post(ada, where, **given)
        assert (answer.status_code, name in answer.json()["error"]) == (400, True)
    assert post(ada, where, reset=["lease"]).json() == {"overrides": {"concurrency": None}}


def with_token(**facts: Any) -> Client:
    secret = f"secret-{ApiToken.objects.count()}"
    digest = hashlib.sha256(secret.encode()).hexdigest()
    owner = User.objects.get(username="ada")
    ApiToken.objects.create(**{"user": "ada", "actor_id": owner.pk, "digest": digest, "queues": [], **facts})
    return Client(headers={"Authorization": f"Bearer {secret}"})


def test_a_token_that_reads_changes_nothing(ada: Client, parts: dict[str, Any]) -> None:
    robot = with_token(scope="read")
    assert robot.get(f"{ROOT}/tasks").json()["tasks"]
    assert "payload" in robot.get(f"{ROOT}/tasks/{parts['pk']['task']}").json()
    before = {model: model.objects.count() for model in (AuditEntry, BulkOperation)}
    for route in [route for route in ROUTES if route.method == "POST"]:
        assert post(robot, address_of(route, parts), **BODIES[route.name]).status_code == 403, route
    assert before == {model: model.objects.count() for model in before}


def test_a_token_of_one_queue_sees_and_changes_only_that(ada: Client, settings: Any) -> None:
    settings.DBTASKQUEUE |= {"QUEUES": {QUEUE: {}, "letters": {}}}
    own, other = make_task(Status.ERROR, queue="letters"), make_task(Status.ERROR)
    robot = with_token(queues=["letters"])
    assert [row["id"] for row in robot.get(f"{ROOT}/tasks").json()["tasks"]] == [own.pk]
    assert robot.get(f"{ROOT}/tasks/{other.pk}").status_code == 404
    assert [row["queue"] for row in robot.get(f"{ROOT}/status").json()["queues"]] == ["letters"]
    answer = post(robot, "tasks/reprocess/ids", ids=[own.pk, other.pk], reason="why").json()
    assert answer == {"changed": 1, "skipped": 1, "skips": {"there is no such task": [other.pk]}}
    for q, code in (("status:ERROR", 400), (f"queue:{QUEUE}", 404), ("queue:letters", 202)):
        answer = post(robot, "tasks/reprocess/search", q=q)
        assert (answer.status_code, QUEUE in answer.content.decode()) == (code, q.endswith(QUEUE)), q
    assert post(robot, "tasks/move/ids", ids=[make_task(queue="letters").pk], to_queue=QUEUE).status_code == 404
    assert post(robot, f"queues/{QUEUE}/pause").status_code == 404
    assert post(robot, "queues/letters/pause").status_code == 200
    actor = Actor(User.objects.get(username="ada"), scope=Scope(queues=("letters",)))  # on a road that hides nothing
    assert [actor.may(PAUSE, queue) for queue in ("letters", QUEUE)] == [True, False]


def test_a_token_ends_also_with_its_user_and_its_use_is_noted_at_most_once_a_minute(ada: Client) -> None:
    now, times, health = timezone.now(), [], f"{ROOT}/health"
    robot, late = with_token(expire_time=now + timedelta(days=1)), with_token(expire_time=now - timedelta(seconds=1))
    for _use in range(2):
        assert (robot.get(health).status_code, late.get(health).status_code) == (200, 401)
        times.append(ApiToken.objects.earliest("pk").last_used_time)
    assert times[0] == times[1] is not None
    ApiToken.objects.update(last_used_time=now - timedelta(minutes=2))
    assert robot.get(health).status_code == 200
    assert ApiToken.objects.earliest("pk").last_used_time > now - timedelta(minutes=1)
    robot = with_token()
    assert robot.get(f"{ROOT}/health").status_code == 200
    User.objects.get(username="ada").delete()
    User.objects.create_superuser("ada")
    assert robot.get(f"{ROOT}/health").status_code == 401
