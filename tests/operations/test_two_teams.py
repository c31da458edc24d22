"""Two teams on one site: whatever the one asks, by page or API, no answer has a word of the other's."""

import json
import re
from datetime import timedelta
from html import unescape
from itertools import product
from typing import Any
from urllib.parse import quote

import pytest
from django.contrib.admin.utils import quote as admin_quote
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.utils import timezone

from django_dbtaskqueue import models
from django_dbtaskqueue.admin import ADMIN_CLASSES
from django_dbtaskqueue.api.urls import ROUTES
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.models import BulkOperation, Poller, Task
from django_dbtaskqueue.operations import bulk, permissions, queue_control
from django_dbtaskqueue.operations.permissions import PAUSE, Actor
from django_dbtaskqueue.operations.verbs import ONE_TASK_VERBS, TASK_VERBS
from tests.factories import make_task
from tests.operations.site import ADMIN, attempt, crawled, failure_group, logged_in, page, post, work
from tests.operations.test_openapi import BODIES

TEAMS = {"alice": "apples", "boris": "bananas"}


def own_queue_only(user: Any, queue: str) -> bool:
    return queue.startswith(TEAMS.get(user.username, queue))


def words_of(queue: str) -> list[str]:
    """Return words that stand only in what belongs to a queue's team, wherever it is stored."""
    return [queue, f"{queue[0]}ref", f"{queue[0]}secret", f"{queue[0]}error"]


@pytest.fixture(autouse=True)
def _teams(settings: Any) -> None:
    # The second queue of each team has no task: it is known by the settings alone.
    queues = {name: {} for queue in TEAMS.values() for name in (queue, f"{queue}-2")}
    rule = {"CAN_VIEW": f"{__name__}.own_queue_only"}
    # The pollers of this test live as long as it does.
    settings.DBTASKQUEUE = {"QUEUES": queues, "API": True, "HEARTBEAT": "1h", **rule}
    for name, queue in TEAMS.items():
        user = User.objects.create_user(name, is_staff=True)
        user.user_permissions.set(Permission.objects.filter(content_type__app_label="dbtaskqueue"))
        make_all(user, queue)
    Poller.objects.create(instance="both", state="RUNNING", queues=[*TEAMS.values()], applied_settings="apples bananas")
    models.PipelineReport.objects.create(kind="report", summary="apples bananas", data={"apples": 1, "bananas": 1})


def make_all(user: User, queue: str) -> None:
    letter, actor = queue[0], Actor(user, "admin")
    facts = {"payload": {"word": f"{letter}secret"}, "process_result": f"ValueError: {letter}error"}
    task = make_task(Status.ERROR, queue=queue, reference=f"{letter}ref", fingerprint=letter * 40, **facts)
    for status in (Status.CREATED, Status.PROCESSING, Status.POISON, Status.COMPLETED):
        make_task(status, queue=queue, reference=f"{letter}ref-{status}", **facts)
    make_task(queue=f"{queue}-rowless", reference=f"{letter}ref")  # not in the settings
    parked = f"no handler for {letter}secret"
    Task.objects.filter(queue=queue, status="CREATED").update(parked_by=parked, ready_time=None)
    models.TaskHistory.objects.create(queue=queue, reference=f"{letter}ref", task_id=task.pk, status="ERROR", **facts)
    error = {"error_type": "ValueError", "message": f"{letter}error", "traceback": f"{letter}error"}
    attempt(task, fingerprint=letter * 40, **error)
    failure_group(letter * 40, queue=queue, message=f"{letter}error")
    for kind, name in (("failure", letter * 40), ("outcome", "completed")):
        models.MinuteCount.objects.create(kind=kind, queue=queue, minute=task.create_time, name=name, count=3)
    for number in range(2):  # the later version is a mark in the charts
        start = timezone.now() - timedelta(minutes=20 - 10 * number)
        shown = {"version": f"{letter}ref-v{number}", "queues": [{"queue": queue, "weight": 2}], "start_time": start}
        Poller.objects.create(instance=f"{letter}ref-poller-{number}", state="RUNNING", **shown)
    for name, query in ((f"{letter}secret", f"queue:{queue}"), (f"{letter}secret-2", f"ref:{letter}ref")):
        models.SavedSearch.objects.create(owner=user.username, name=name, query=query, shared=True)
    daily = {"queue": queue, "cron": "0 7 * * *", "payload": facts["payload"]}
    models.Schedule.objects.create(name=f"{letter}ref-schedule", **daily)
    queue_control.apply_to_queues(PAUSE, [queue], actor, reason=f"{letter}secret")
    bulk.start("reprocess", f"queue:{queue} ref:{letter}ref", actor, f"{letter}secret")
    bulk.start("reprocess", f"ref:{letter}ref", actor, f"{letter}secret")


def leaks(answer: Any, foreign: list[str]) -> list[str]:
    text = unescape((b"".join(answer.streaming_content) if answer.streaming else answer.content).decode())
    return [word for word in foreign if word in text + json.dumps(dict(answer.headers))]


def two(name: str) -> tuple[Client, str, str]:
    """Return the browser of a user, the own queue, and that of the other team."""
    (other,) = [queue for user, queue in TEAMS.items() if user != name]
    return logged_in(User.objects.get(username=name)), TEAMS[name], other


def test_every_page_that_a_team_can_reach_is_about_its_own_queues() -> None:
    # The other's queues come first in the order of names, and its own rows in that of ids.
    browser, own, other = two("boris")
    foreign = words_of(other)
    # Rows of both teams by their addresses, as somebody would guess them. A name that is typed would be repeated.
    keys = [(one, str(pk)) for one in ADMIN_CLASSES for pk in one._default_manager.values_list("pk", flat=True)]
    own_or_both = [(model, pk) for model, pk in keys if not any(word in pk for word in foreign)]
    guessed = [f"{ADMIN}{model._meta.model_name}/{admin_quote(pk)}/change/" for model, pk in own_or_both]
    guessed += [f"{ADMIN}task/{query}" for query in ("?whole=1", "?q=error:error", "?q=-ref:x", "?_live=1")]
    asked = dict(crawled(browser, *guessed))
    assert {answer.status_code for answer in asked.values()} <= {200, 302, 404}
    assert {address: known for address, answer in asked.items() if (known := leaks(answer, foreign))} == {}
    assert len(asked) > 40
    shown = page(browser, f"{ADMIN}task/")
    assert all(word in shown for word in words_of(own)[:2])


def test_no_action_of_a_page_tells_of_the_others_or_changes_what_they_have() -> None:
    name, found = "alice", {}
    browser, own, foreign = two(name)
    BulkOperation.objects.exclude(actor=name).update(state="FINISHED")  # as if they could be put back
    theirs = Task.objects.filter(queue__startswith=foreign).order_by("pk")
    ids, before = list(theirs.values_list("pk", flat=True)), list(theirs.values())
    searches = [f"fingerprint:{foreign[0] * 40}", "status:ERROR,CREATED", f"-ref:x queue:{own}"]
    inputs = {"confirm": "1", "reason": "why", "older_than": "1m", "to": "delete", "for": "1h", "priority": "7",
              "to_queue": foreign, "payload": "{}"}  # fmt: skip
    sent = [("task/", {"again": pk, **answers}) for pk in ids for answers in ({}, inputs)]
    for (turn, verb), answers in product(enumerate((*TASK_VERBS, *ONE_TASK_VERBS)), ({}, inputs)):
        one, chosen = searches[turn % len(searches)], ids if verb in TASK_VERBS else ids[:1]
        sent.append(("task/", {"action": verb, "_selected_action": chosen, **answers}))
        sent += [(f"task/?q={quote(one)}", {"action_on_all": verb, **answers})] if verb in TASK_VERBS else []
    for key in BulkOperation.objects.exclude(actor=name).values_list("pk", flat=True):
        sent += [("bulkoperation/", {"operation": key, "put_back": "1", **answers}) for answers in ({}, inputs)]
    for at, (where, posted) in enumerate(sent):
        answer = browser.post(f"{ADMIN}{where}", posted, follow=True)
        assert answer.status_code in (200, 403, 404), (where, posted)
        typed = {foreign} if "to_queue" in posted else set()  # a refusal may repeat what was typed
        if known := set(leaks(answer, words_of(foreign))) - typed:
            found[at] = (where, posted, known)
    assert found == {}
    work()
    mine = BulkOperation.objects.filter(actor=name, state="FINISHED", changed__gt=0)
    assert mine.exists(), "no action reached the team's own tasks"
    assert list(theirs.values()) == before


def test_every_answer_of_the_api_is_about_its_own_queues() -> None:
    browser, own, foreign = two("boris")
    found = {}
    keys = {
        "pk": [*Task.objects.values_list("pk", flat=True), *BulkOperation.objects.values_list("pk", flat=True)],
        "verb": ["reprocess", "delete"], "queue": [own, f"{own}x"], "poller": ["both"], "command": ["drain"],
        "fingerprint": [queue[0] * 40 for queue in TEAMS.values()], "schedule": [f"{own[0]}ref-schedule"],
        "action": ["pause", "run"],
    }  # fmt: skip
    for route in ROUTES:
        addresses = [f"/api/{route.path}"]
        for part, values in keys.items():
            if f":{part}>" in route.path:
                addresses = [re.sub(rf"<\w+:{part}>", str(value), one) for one in addresses for value in values]
        body = BODIES.get(route.name, {}) | ({"ids": keys["pk"]} if route.name == "act_on_task_ids" else {})
        for address in addresses:
            get = route.method == "GET"
            answer = browser.get(address) if get else post(browser, address.removeprefix("/api/"), **body)
            assert answer.status_code < 500, address
            if known := leaks(answer, words_of(foreign)):
                found[address] = known
    assert found == {}
    assert Task.objects.filter(queue=foreign).count() == 5, "an action reached the other team's tasks"
    assert Task.objects.filter(queue=foreign, status="ERROR").exists()


@pytest.mark.parametrize("name", TEAMS)
def test_a_team_counts_moves_and_stops_only_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    browser, own, foreign = two(name)
    assert browser.get("/api/tasks/count").json()["count"]["number"] == 6
    assert browser.get("/api/tasks/count", {"q": f"queue:{foreign}"}).json()["count"]["number"] == 0
    status = browser.get("/api/status").json()
    assert {row["queue"] for row in status["queues"]} == {own, f"{own}-2", f"{own}-rowless"}
    assert status["pollers"] == 3
    assert sum(sum(point["outcomes"].values()) for point in browser.get("/api/trends").json()["points"]) == 3
    ours = bulk.start("reprocess", f"queue:{own},{own}-2", None)  # by somebody else, over queues that all are visible
    bulk.start("reprocess", f"queue:{own},{foreign}", None)
    shown = [one["id"] for one in browser.get("/api/operations").json()["operations"]]
    assert len(shown) == 3 and ours.pk in shown
    monkeypatch.setattr(permissions, "MAX_ROWS_JUDGED_ONE_BY_ONE", 1)  # a bound on those over several queues alone
    assert len(browser.get("/api/operations").json()["operations"]) == 2
    assert [one["failed"]["7d"] for one in browser.get("/api/failures").json()["failures"]] == [3]
    seen = post(browser, "tasks/reprocess/preview", q=f"ref:{own[0]}ref,{foreign[0]}ref").json()
    assert (seen["selected"]["number"], seen["eligible"]["number"]) == (2, 1)
    # A wrong target and a stuck poller name no queue of others.
    for to_queue in ("nope", foreign):
        moved = post(browser, "tasks/move/ids", ids=[Task.objects.filter(queue=own)[0].pk], to_queue=to_queue)
        assert (moved.status_code, leaks(moved, [f"{foreign}-2", f"{foreign}-rowless"])) == (404, [])
    served = [{"queue": f"{queue}-rowless", "idle_seconds": 3600} for queue in TEAMS.values()]
    Poller.objects.filter(instance="both").update(queues=served, slots=9, heartbeat_time=timezone.now())
    Task.objects.filter(queue__endswith="-rowless").update(ready_time=timezone.now() - timedelta(hours=1))
    (stuck,) = [one["words"] for one in browser.get("/api/doctor").json()["findings"] if one["id"] == "poller.stuck"]
    assert f"took nothing from {own}-rowless " in stuck
    # It stops neither the others' work nor their pollers.
    theirs = BulkOperation.objects.filter(query__contains=f"ref:{foreign[0]}ref").order_by("pk")
    for operation in theirs:
        assert post(browser, f"operations/{operation.pk}/cancel").status_code == 404
        assert browser.post(f"{ADMIN}bulkoperation/", {"operation": operation.pk, "cancel": "1"}).status_code == 404
    for poller, code in ((f"{foreign[0]}ref-poller-0", 404), ("both", 403)):
        assert post(browser, f"pollers/{poller}/stop").status_code == code
        browser.post(f"{ADMIN}poller/", {"action": "stop", "_selected_action": poller, "confirm": "1"})
    assert set(Poller.objects.values_list("requested_command", flat=True)) == {""}
    assert set(theirs.values_list("state", flat=True)) == {"WAITING"}
    for operation in BulkOperation.objects.filter(query__contains=f"ref:{own[0]}ref"):
        assert post(browser, f"operations/{operation.pk}/cancel").json()["cancelled"]
    work()
    assert not theirs.exclude(state="FINISHED").exists()
