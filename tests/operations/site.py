"""The site as operators use it: its addresses and users, and what they ask by page, API and command line."""

import json
import re
from collections.abc import Callable, Iterator
from html import unescape
from typing import Any
from urllib.parse import parse_qsl, urljoin

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.db.models.functions import Now
from django.test import Client
from django.test.html import Element
from django.urls import include, path

from django_dbtaskqueue.admin import ADMIN_CLASSES
from django_dbtaskqueue.api.prometheus import metrics
from django_dbtaskqueue.core.exceptions import TaskQueueError
from django_dbtaskqueue.models import Attempt, FailureGroup, Task
from django_dbtaskqueue.operations import bulk
from tests.factories import QUEUE
from tests.support import output_of

api = path("api/", include("django_dbtaskqueue.api.urls"))
urlpatterns = [path("admin/", admin.site.urls), api, path("metrics", metrics)]
ADMIN = "/admin/dbtaskqueue/"
TASKS, QUEUES, POLLERS, OVERVIEW = (f"{ADMIN}{name}/" for name in ("task", "queue", "poller", "overview"))
LINK = re.compile(r'(?:href|action|data-url|src)="([^"]+)"')


def user(*codenames: str, name: str = "ada", staff: bool = False) -> User:
    made = User.objects.create_user(name, is_staff=staff)
    made.user_permissions.set(Permission.objects.filter(content_type__app_label="dbtaskqueue", codename__in=codenames))
    return made


def client(*codenames: str, name: str = "ada", staff: bool = False) -> Client:
    return logged_in(user(*codenames, name=name, staff=staff))


def staff(*codenames: str, name: str = "staff") -> Client:
    return client(*codenames, name=name, staff=True)


def logged_in(known: User, **options: Any) -> Client:
    found = Client(**options)
    found.force_login(known)
    return found


def only_parcels(user: User, *asked: str) -> bool:
    """A rule for ``CAN_VIEW`` and ``CAN_OPERATE``: the last that is asked about is the queue."""
    return asked[-1] == QUEUE


ONLY_PARCELS = f"{__name__}.{only_parcels.__name__}"


def text(response: Any) -> str:
    """Return a page without what says only in which direction a text is read."""
    assert response.status_code == 200, response
    return re.sub(r"</?bdi[^>]*>| dir=.auto.", "", response.content.decode())


def page(browser: Client, address: str, **query: str) -> str:
    return unescape(text(browser.get(address, query)))


def shape_of(address: str) -> tuple[str, ...]:
    """Return what two links have in common that differ in the rows they show."""
    where, _, query = address.partition("?")
    parts = [key if key != "q" else re.sub(r":[^+&]*", "", f"q={value}") for key, value in parse_qsl(query)]
    return (re.sub(r"/[^/]*[-_\d][^/]*/(?=change|history|report)", "/N/", where), *sorted(parts))


def crawled(browser: Client, *guessed: str) -> Iterator[tuple[str, Any]]:
    """Yield the guessed addresses, the admin's lists, and one link of each form they lead to; and the answers."""
    waiting = [*guessed, "/admin/", *(f"{ADMIN}{model._meta.model_name}/" for model in ADMIN_CLASSES)]
    known, asked, shapes = set(waiting), set[str](), set[tuple[str, ...]]()
    while waiting:
        address = waiting.pop(0).partition("#")[0]
        if address in asked or not address.startswith("/admin/") or "logout" in address or "password" in address:
            continue
        if shape_of(address) in shapes and address not in known:
            continue
        shapes.add(shape_of(address))
        asked.add(address)
        answer = browser.get(address)
        yield address, answer
        if answer.status_code == 200 and "html" in answer.headers["Content-Type"]:
            waiting += [urljoin(address, unescape(link)) for link in LINK.findall(answer.content.decode())]


def elements(node: Element) -> Iterator[Element]:
    """Yield an element of a page and all in it."""
    yield node
    for child in node.children:
        if isinstance(child, Element):
            yield from elements(child)


def post(browser: Client, where: str, **given: Any) -> Any:
    return browser.post(f"/api/{where}", given, content_type="application/json")


def refused(
    words: str | None, call: Callable[..., Any], *given: Any, error: type[Exception] = TaskQueueError, **options: Any
) -> None:
    with pytest.raises(error, match=words):
        call(*given, **options)


def command(*words: object) -> str:
    return output_of("taskqueue", *words, no_color=True)


def data(*words: object) -> Any:
    return json.loads(command(*words, "--json"))


def attempt(task: Task, **columns: Any) -> Attempt:
    rows = Attempt.objects.using(task._state.db)
    return rows.create(**{"task_id": task.pk, "queue": task.queue, "attempt": 1, "total_attempt": 1, **columns})


def failure_group(fingerprint: str, **columns: Any) -> FailureGroup:
    facts = {"queue": QUEUE, "first_seen": Now(), "last_seen": Now(), **columns}
    return FailureGroup.objects.create(fingerprint=fingerprint, **facts)


def work(alias: str = "default") -> int:
    turns = 0
    while bulk.turn(alias):
        turns += 1
    return turns
