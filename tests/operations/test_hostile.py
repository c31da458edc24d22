"""Hostile input: whatever is sent to any page or route, by any verb, the answer is not a failure of the server.

The soak, ``pytest tests/operations/test_hostile.py -m soak``, sends 20,000 to each database. The name has the seed.
"""

import json
import re
from functools import partial
from itertools import product
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError
from django.test import Client
from hypothesis import HealthCheck, given, seed, settings, strategies as st

from django_dbtaskqueue import QueueFull, enqueue
from django_dbtaskqueue.admin import ADMIN_CLASSES
from django_dbtaskqueue.api.urls import ROUTES
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.queue import FIXED_SETTINGS, QUEUE_KEYS
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.models import AuditEntry, BulkOperation, Poller, Queue, SavedSearch, Task
from django_dbtaskqueue.operations import bulk
from django_dbtaskqueue.operations.permissions import Actor
from django_dbtaskqueue.operations.search import QUALIFIERS, parse
from django_dbtaskqueue.operations.verbs import TASK_VERBS
from tests.conftest import ProcessDatabase
from tests.factories import QUEUE, make_task
from tests.operations.site import ADMIN, QUEUES, TASKS, command, failure_group, logged_in, post, refused, text

SOAK = [pytest.param(number, 1000, marks=pytest.mark.soak) for number in range(1, 21)]
LISTS = [f"{ADMIN}{model._meta.model_name}/" for model in ADMIN_CLASSES]
TEXTS = [
    "", "0", "-1", "1", "5", "9" * 30, "1e309", "NaN", "true", "null", "[]", "\0", "a\0b", "\ud800", "é", "%00",
    "../..", "\u202e", "<script>", "'; DROP TABLE x; --", "9999-12-31T23:59:59-12:00", "0001-01-01", "1969-12-31",
    "2200-12-31", "30m", "999999999999999d", "-5d", "PT1M", "history", "delete", "claims", QUEUE, "x" * 5000,
    "status:ERROR", "is:due", "payload" + ".a" * 500 + ":1", "ref:" + ",".join(map(str, range(2000))),
    " ".join(["id:>1"] * 60), 'ref:"', "created:9999-12-31", "created:<=9999-12-31",
    "created:2026-01-01..9999-12-31", "age:>36600d", "error:x",
    "payload.a:>b", "payload.password:x", "-queue:x", "id:99999999999999999999", "queue:a,b", "f" * 40, "p1", "RUNNING",
    "WAITING", "default",
]  # fmt: skip
VALUES: st.SearchStrategy[Any] = st.sampled_from(TEXTS) | st.text(max_size=20)
JSON_VALUES = st.recursive(
    VALUES | st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(VALUES, inner, max_size=3),
    max_leaves=5,
)
FIELDS = """
    q limit before after whole _live name instance task_id fingerprint actor verb state kind error_type p o e _facets
    _popup _changelist_filters nonsense since"""
NAMES = st.sampled_from([*QUALIFIERS, *FIELDS.split()])
ANSWERS = """
    action _selected_action select_across confirm recount reason until older_than days to origin again save_view
    forget_view view_name view_shared set value queue purge typed operation cancel index"""
POSTED = st.sampled_from(ANSWERS.split())
ACTIONS = st.sampled_from([*TASK_VERBS, "pause", "resume", "start", "drain", "stop", "explode"]) | VALUES


@pytest.fixture
def browser(settings: Any) -> Client:
    settings.DBTASKQUEUE |= {"QUEUES": {QUEUE: {}}, "OPERATIONS_TIMEOUT": "20s"}
    make_task(Status.ERROR, payload={"a": 1}, process_result="no", fingerprint="f" * 40)
    make_task()
    Poller.objects.create(instance="p1", state="RUNNING", queues=[QUEUE])
    failure_group("f" * 40)
    bulk.start("reprocess", "status:ERROR", None)
    return logged_in(User.objects.create_superuser("ada"), raise_request_exception=False)


def parts_of(address: str, data: st.DataObject) -> str:
    def fill(found: re.Match[str]) -> str:
        if found[1] == "int":
            return data.draw(st.sampled_from(["0", "1", "7", "9" * 25]))
        known = {"verb": ["reprocess", "delete"], "queue": [QUEUE], "poller": ["p1"], "command": ["drain"],
                 "schedule": ["nightly"], "action": ["run"]}  # fmt: skip
        value = data.draw(st.sampled_from(known.get(found[2], ["f" * 40])) | VALUES)
        return str(value).encode("utf-8", "replace").decode().replace("/", "").replace("\0", "%00") or "x"

    return re.sub(r"<(\w+):(\w+)>", fill, address)


def send(browser: Client, data: st.DataObject) -> tuple[str, Any, Any]:
    if data.draw(st.booleans()):
        route = data.draw(st.sampled_from(ROUTES))
        address = f"/api/{parts_of(route.path, data)}"
        method = data.draw(st.sampled_from([route.method, route.method, "GET", "POST", "PUT"])).lower()
        if method == "get":
            own = st.sampled_from([field.name for field in route.query] or ["x"])
            sent = data.draw(st.dictionaries(own | NAMES, VALUES, max_size=3))
            return address, sent, browser.get(address, encoded(sent))
        keys = st.sampled_from([field.name for field in route.body] or ["x"])
        sent = data.draw(st.dictionaries(keys, JSON_VALUES, max_size=4) | JSON_VALUES)
        text = data.draw(st.sampled_from([json.dumps(sent)] * 4 + ["[" * 100_000, "{", "\0", "1" * 6000]))
        return address, sent, getattr(browser, method)(address, text, content_type="application/json")
    address = data.draw(st.sampled_from(LISTS))
    kind = data.draw(st.sampled_from(["list", "list", "row", "history", "post"]))
    if kind in ("row", "history"):
        key = str(data.draw(st.sampled_from(["1", "2", QUEUE, "p1", "f" * 40]) | VALUES)).replace("/", "_2F")
        address += f"{key.encode('utf-8', 'replace').decode() or '1'}/{'change' if kind == 'row' else 'history'}/"
        address = address.replace("\0", "%00").replace("?", "%3F").replace("#", "%23")
    sent = data.draw(st.dictionaries(NAMES, VALUES, max_size=3))
    if kind != "post":
        return address, sent, browser.get(address, encoded(sent))
    body = data.draw(st.dictionaries(POSTED, VALUES, max_size=5)) | {"action": data.draw(ACTIONS)}
    return address, body, browser.post(address, encoded(body))


def encoded(sent: dict[str, Any]) -> dict[str, str]:
    """Return texts that a browser can send: half a surrogate pair cannot be."""
    return {name: str(value).encode("utf-8", "replace").decode() for name, value in sent.items()}


@pytest.mark.parametrize(("number", "requests"), [(0, 100), *SOAK])
def test_no_request_is_a_failure_of_the_server(
    process_database: ProcessDatabase, browser: Client, number: int, requests: int
) -> None:
    @seed(number)
    @settings(max_examples=requests, suppress_health_check=[*HealthCheck], database=None)
    @given(st.data())
    def hold(data: st.DataObject) -> None:
        address, sent, answer = send(browser, data)
        assert answer.status_code < 500, (address, sent, getattr(answer, "exc_info", None))
        if address.startswith("/api/") and answer.status_code >= 400:
            assert answer.json()["error"], (address, sent)

    hold()


def test_a_search_has_a_limit_that_is_said_and_a_refusal_names_the_field(browser: Client) -> None:
    ids = ",".join(map(str, range(1001)))
    for search in ("ref:" + "a" * 5000, " ".join(["id:>1"] * 51), f"ref:{ids}", "payload" + ".a" * 33 + ":1"):
        refused("at most", parse, search)
        answer = browser.get("/api/tasks", {"q": search})
        assert (answer.status_code, "at most" in answer.json()["error"]) == (400, True)
        assert browser.get(TASKS, {"q": search}).status_code == 200
    tables = (AuditEntry, BulkOperation, Queue)
    before = [table._default_manager.count() for table in tables]
    for where, sent, field in REFUSED:
        answer = post(browser, where, **sent)
        assert (answer.status_code, f"'{field}'" in answer.json()["error"]) == (400, True), answer.json()
    for name in ("batch", "schedule"):
        assert browser.post(f"{ADMIN}{name}/", {"action": "explode"}).status_code == 400
    assert [table._default_manager.count() for table in tables] == before


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *(("queues/parcels/pause", {"until": end}, "until") for end in ("9999-12-31T23:59:59-12:00", "1969-01-01")),
    ("queues/parcels/pause", {"for": "999999999999999d"}, "for"),
    *(("queues/parcels/pause", {"reason": reason}, "reason") for reason in ("a\0b", "\ud800")),
    *(("tasks/reprocess/search", {"q": "status:ERROR", "limit": limit}, "limit") for limit in (10**30, 0, -4)),
    ("tasks/housekeep/search", {"q": "status:ERROR", "older_than": "10000000d"}, "older_than"),
    ("tasks/delete/ids", {"ids": [1], "queue": "a\0", "reason": "why"}, "queue"),
    ("tasks/reprocess/ids", {}, "ids"),
    ("queues/a%00b/pause", {}, "queue"),
]


def test_ids_are_those_of_the_queue_and_saved_searches_hide_none_of_anothers(browser: Client) -> None:
    task = make_task(queue="letters")
    answer = post(browser, "tasks/delete/ids", ids=[task.pk], queue=QUEUE, reason="why")
    assert answer.json() == {"changed": 0, "skipped": 1, "skips": {"there is no such task": [task.pk]}}
    assert Task.objects.filter(pk=task.pk).exists()
    SavedSearch.objects.bulk_create(
        SavedSearch(owner="mallory", name=f"!{number:03}", query="status:ERROR", shared=True) for number in range(150)
    )
    SavedSearch.objects.create(owner="ada", name="my own search", query="status:POISON")
    assert "my own search" in text(browser.get(TASKS))


def test_the_audit_names_the_account_of_the_process_and_not_what_the_environment_says(monkeypatch: Any) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "ceo")
    assert Actor().name != "ceo"


# -- each setting that operators change, down every road: it works, or is refused by its name --------------------------
NUMBERS: list[Any] = [10**400, float("nan"), float("inf"), 2**63, -1, "9" * 5000, f"{'9' * 400}/s"]
NAMED = [name for name in QUEUE_KEYS if name not in FIXED_SETTINGS]
SETTINGS = [*product(NAMED, [*NUMBERS, "", True, "geometric:1s,x1e999", [[]]])]


@pytest.mark.slow
def test_a_setting_in_a_row_that_sql_wrote_is_applied_or_refused() -> None:
    for name, value in SETTINGS:
        try:
            conf.overlay(conf.QueueSettings(), {name: value})
        except ImproperlyConfigured as error:
            assert name in str(error)


@pytest.mark.slow
def test_a_setting_by_a_page_the_api_and_the_command_line(op: Client) -> None:
    op.raise_request_exception = False
    wrong = []
    for name, value in SETTINGS:
        answer = post(op, f"queues/{QUEUE}/settings", values={name: value}, reason="why")
        if answer.status_code not in (200, 400) or (answer.status_code == 400 and name not in answer.json()["error"]):
            wrong.append(("API", name, value, answer.content))
        text = str(value).encode("utf-8", "replace").decode()
        form = {"queue": QUEUE, "set": name, "value": text, "confirm": "yes", "reason": "why"}
        if (code := op.post(QUEUES, form).status_code) not in (200, 302):
            wrong.append(("page", name, value, code))
        for use in (partial(command, "set", QUEUE, f"{name}={text}"), partial(enqueue, QUEUE)):
            try:
                use()
            except QueueFull:
                pass
            except Exception as error:
                if not isinstance(error, CommandError) or name not in str(error):
                    wrong.append((use, name, value, repr(error)))
        if Queue.objects.exists() and op.get(f"{QUEUES}{QUEUE}/change/").status_code != 200:
            wrong.append(("then", name, value, "the queue's page"))
        Queue.objects.all().delete()
    assert not wrong, "\n".join(f"{one!r:.300}" for one in wrong)
