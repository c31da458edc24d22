"""Who may do what, by every way in: role by verb by way, each cell judged by what really changed.

A new way in is one line in ``WAYS``; a new verb without a row in ``EFFECTS`` fails.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import AnonymousUser, Permission, User
from django.core.exceptions import PermissionDenied
from django.core.management import call_command
from django.db import transaction
from django.db.models.functions import Now
from django.test import Client
from django.urls import include, path

from django_dbtaskqueue.models import AuditEntry, Poller, Queue, Signal, Task
from django_dbtaskqueue.models.control import IN_EFFECT
from django_dbtaskqueue.operations import actions, bulk, queue_control
from django_dbtaskqueue.operations.permissions import Actor, Verb, can_operate
from django_dbtaskqueue.operations.queue_control import pause
from django_dbtaskqueue.operations.verb_inputs import VerbOptions
from django_dbtaskqueue.operations.verbs import ID_VERBS, TASK_VERBS, VERBS
from tests.factories import QUEUE, make_task

urlpatterns = [
    path("admin/", admin.site.urls),
    path("api/", include("django_dbtaskqueue.api.urls")),
]
pytestmark = [pytest.mark.django_db, pytest.mark.urls(__name__)]
OURS = "dbtaskqueue"
TOKEN = "a-token"
# What each verb is given, as options and as people write them.
NOW = VerbOptions(
    older_than=timedelta(0), delay=timedelta(days=2), priority=7, queue="letters", payload={}, signal="go"
)
GIVEN: dict[str, dict[str, Any]] = {
    "housekeep": {"older_than": "0s", "to": "history"},
    "snooze": {"for": "2d"},
    "change_priority": {"priority": "7"},
    "move": {"to_queue": "letters"},
    "edit": {"payload": "{}"},
    "signal": {"signal": "go"},
}


# -- what a verb does when it is allowed -------------------------------------------------------------------------------


def left(status: str) -> Callable[[], bool]:
    """Return whether the one task is no longer in the status it had."""
    return lambda: not Task.objects.filter(status=status).exists()


def paused() -> bool:
    return Queue.objects.filter(IN_EFFECT, name=QUEUE).exists()


def changed() -> bool:
    return Queue.objects.filter(name=QUEUE, overrides__batch_size=7).exists()


def told() -> bool:
    return Poller.objects.filter(requested_command="drain").exists()


# Each verb: the status of the task it is tried on, and how its effect is seen.
EFFECTS: dict[str, tuple[str, Callable[[], bool]]] = {
    "signal": ("CREATED", lambda: Signal.objects.filter(name="go").exists()),
    "reprocess": ("ERROR", left("ERROR")),
    "mark_poison": ("ERROR", left("ERROR")),
    "unpoison": ("POISON", left("POISON")),
    "kick": ("POISON", left("POISON")),
    "cancel": ("CREATED", left("CREATED")),
    "run_now": ("CREATED", lambda: Task.objects.due().exists()),
    "snooze": ("CREATED", lambda: Task.objects.filter(ready_time__gt=Now() + timedelta(hours=30)).exists()),
    "change_priority": ("CREATED", lambda: Task.objects.filter(priority=7).exists()),
    "move": ("CREATED", lambda: Task.objects.filter(queue="letters").exists()),
    "edit": ("ERROR", left("ERROR")),
    "release": ("PROCESSING", left("PROCESSING")),
    "housekeep": ("COMPLETED", left("COMPLETED")),
    "delete": ("CREATED", left("CREATED")),
    "purge": ("CREATED", left("CREATED")),
    "pause": ("CREATED", paused),
    "resume": ("CREATED", lambda: not paused()),
    "change_settings": ("CREATED", changed),
    "control_pollers": ("CREATED", told),
    "view_payload": ("ERROR", lambda: False),
}


# -- the roles ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Role:
    """Who tries: which permissions, and where they suffice."""

    permissions: Callable[[str], Any]  # of the verb's own permission -> a filter of our permissions
    anywhere: bool = False  # allowed by a way for any user
    in_admin: bool = False  # allowed by a way for staff only
    staff: bool = True
    active: bool = True
    superuser: bool = False
    denied: bool = False  # by the project's rule for this queue


def everything(_codename: str) -> Any:
    return Permission.objects.filter(content_type__app_label=OURS)


def looking(_codename: str) -> Any:
    return everything("").filter(codename__startswith="view_").exclude(codename="view_payload")


def own(codename: str) -> Any:
    """The verb's own permission; to edit a payload, a user must also be allowed to see it."""
    both = ["edit_payload_task", "view_payload"]
    return everything("").filter(codename__in=both if codename in both[:1] else [codename])


ROLES: dict[str, Role] = {
    "nothing": Role(lambda _codename: Permission.objects.none()),
    "looking": Role(looking),
    "all but this": Role(lambda codename: everything("").exclude(codename=codename)),
    "only this": Role(lambda codename: looking("") | own(codename), anywhere=True, in_admin=True),
    "only this, not staff": Role(lambda codename: looking("") | own(codename), anywhere=True, staff=False),
    "all, inactive": Role(everything, active=False),
    "all, not on this queue": Role(everything, denied=True),
    "superuser": Role(lambda _codename: Permission.objects.none(), superuser=True, anywhere=True, in_admin=True),
}


def deny_the_denied(user: Any, verb: str, queue: str) -> bool:
    return not user.username.startswith("all, not on")


def make_user(name: str, verb: Verb) -> User:
    role = ROLES[name]
    user = User.objects.create_user(name, is_staff=role.staff, is_active=role.active, is_superuser=role.superuser)
    user.user_permissions.set(role.permissions(verb.permission))
    return User.objects.get(pk=user.pk)


# -- the ways in -------------------------------------------------------------------------------------------------------


def client(user: Any) -> Client:
    """Return the user's client, logged in once: sessions are cookies here, and survive a rollback."""
    if "client" not in vars(user):
        user.client = Client()
        user.client.force_login(user)
    found: Client = user.client
    return found


def posted(user: Any, where: str, **given: Any) -> None:
    client(user).post(where, json.dumps(given), content_type="application/json")


def by_token(user: Any, verb: Verb, task: Task) -> None:
    body = json.dumps({"ids": [task.pk], "reason": "why", **GIVEN.get(verb.name, {})})
    headers = {"Authorization": f"Bearer {TOKEN}{user.pk}"}
    where = f"/api/tasks/{verb.name}/ids"
    Client().post(where, body, content_type="application/json", headers=headers)


def by_admin(user: Any, verb: Verb, task: Task) -> None:
    data = {"action": verb.name, "_selected_action": task.pk, "confirm": "yes", "reason": "why"}
    client(user).post("/admin/dbtaskqueue/task/", data | GIVEN.get(verb.name, {}))


def by_admin_search(user: Any, verb: Verb, task: Task) -> None:
    data = {"action": verb.name, "select_across": "1", "confirm": "yes", "reason": "why", "_selected_action": task.pk}
    client(user).post(f"/admin/dbtaskqueue/task/?q=id:{task.pk}", data | GIVEN.get(verb.name, {}))


def by_admin_queue(user: Any, verb: Verb, task: Task) -> None:
    data = {"action": verb.name, "_selected_action": QUEUE, "confirm": "yes", "reason": "why"}
    client(user).post("/admin/dbtaskqueue/queue/", data)


def by_admin_settings(user: Any, verb: Verb, task: Task) -> None:
    client(user).post("/admin/dbtaskqueue/queue/", {"queue": QUEUE, "set": "batch_size", "value": "7"})


def by_admin_poller(user: Any, verb: Verb, task: Task) -> None:
    client(user).post("/admin/dbtaskqueue/poller/", {"action": "drain", "_selected_action": "p1", "confirm": "yes"})


def by_api_ids(user: Any, verb: Verb, task: Task) -> None:
    posted(user, f"/api/tasks/{verb.name}/ids", ids=[task.pk], reason="why", **GIVEN.get(verb.name, {}))


def by_api_search(user: Any, verb: Verb, task: Task) -> None:
    posted(user, f"/api/tasks/{verb.name}/search", q=f"id:{task.pk}", reason="why", **GIVEN.get(verb.name, {}))


def by_api_purge(user: Any, verb: Verb, task: Task) -> None:
    posted(user, f"/api/queues/{QUEUE}/purge", confirm=QUEUE, reason="why")


def by_api_pause(user: Any, verb: Verb, task: Task) -> None:
    posted(user, f"/api/queues/{QUEUE}/pause", reason="why")


def by_api_start(user: Any, verb: Verb, task: Task) -> None:
    posted(user, f"/api/queues/{QUEUE}/start")


def by_act(user: Any, verb: Verb, task: Task) -> None:
    actions.act(
        Task.objects.filter(pk=task.pk), actions.ActionRequest(ID_VERBS[verb.name], "why", NOW), Actor(user, "code")
    )


def by_bulk(user: Any, verb: Verb, task: Task) -> None:
    q = f"queue:{QUEUE}" if verb.name == "purge" else f"id:{task.pk}"
    bulk.start(verb.name, q, user, "why", options=NOW, source="code")


def by_queue_act(user: Any, verb: Verb, task: Task) -> None:
    if verb.name == "change_settings":
        queue_control.change_settings(QUEUE, {"batch_size": 7}, Actor(user, "code"))
    else:
        {"pause": queue_control.pause_queues, "resume": queue_control.resume_queues}[verb.name](
            [QUEUE], Actor(user, "code")
        )


def by_poller_act(user: Any, verb: Verb, task: Task) -> None:
    queue_control.command_pollers(["p1"], "drain", Actor(user, "code"))


@dataclass(frozen=True)
class Way:
    """A way in: how a verb is used by it, whether it is for staff only, and whether it names the queue at all."""

    use: Callable[[Any, Verb, Task], None]
    verbs: tuple[str, ...]
    in_admin: bool = False
    by_queue: bool = True


ON_TASKS = tuple(TASK_VERBS)
WAYS: dict[str, Way] = {
    "admin action": Way(by_admin, (*ON_TASKS, "edit"), in_admin=True),
    "admin search": Way(by_admin_search, ON_TASKS, in_admin=True),
    "admin queues": Way(by_admin_queue, ("pause", "resume"), in_admin=True),
    "admin settings": Way(by_admin_settings, ("change_settings",), in_admin=True),
    "admin pollers": Way(by_admin_poller, ("control_pollers",), in_admin=True),
    "api ids": Way(by_api_ids, (*ON_TASKS, "edit")),
    "api token": Way(by_token, (*ON_TASKS, "edit")),
    "api search": Way(by_api_search, ON_TASKS),
    "api purge": Way(by_api_purge, ("purge",)),
    "api pause": Way(by_api_pause, ("pause",)),
    "api start": Way(by_api_start, ("resume",)),
    "act": Way(by_act, (*ON_TASKS, "edit")),
    "bulk operation": Way(by_bulk, (*ON_TASKS, "purge")),
    "queue act": Way(by_queue_act, ("pause", "resume", "change_settings")),
    "poller act": Way(by_poller_act, ("control_pollers",)),
}


@pytest.fixture(autouse=True)
def _rule(settings: Any) -> None:
    settings.SESSION_ENGINE = "django.contrib.sessions.backends.signed_cookies"
    settings.DBTASKQUEUE = {
        "QUEUES": {QUEUE: {}, "letters": {}},
        "API": True,
        "CAN_OPERATE": f"{__name__}.deny_the_denied",
    }


def situation(verb: str) -> Task:
    """Make what a verb can change: a task, a queue, a poller."""
    later = {"ready_time": timedelta(days=1)} if EFFECTS[verb][0] == "CREATED" else {}
    task = make_task(EFFECTS[verb][0], payload={"name": "Ada"}, **later)
    Poller.objects.create(instance="p1", state="RUNNING", queues=[QUEUE])
    if verb == "resume":
        pause([QUEUE], by="somebody")
    return task


def happened(way: Way, verb: Verb, user: Any) -> bool:
    """Use the verb by the way, let the background do its work, look, and undo it all.

    What is refused leaves no record, and what is done leaves one.
    """
    with transaction.atomic():
        task = situation(verb.name)
        with suppress(PermissionDenied):
            way.use(user, verb, task)
        while bulk.turn("default"):
            pass
        done = EFFECTS[verb.name][1]()
        assert done == any(entry.changed for entry in AuditEntry.objects.filter(verb=verb.name))
        transaction.set_rollback(True)
    return done


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "view_payload"])
def test_a_verb_is_done_for_those_who_may_and_for_nobody_else(settings: Any, verb: str) -> None:
    users = {role: make_user(role, VERBS[verb]) for role in ROLES}
    tokens = {user.username: hashlib.sha256(f"{TOKEN}{user.pk}".encode()).hexdigest() for user in users.values()}
    settings.DBTASKQUEUE = {**settings.DBTASKQUEUE, "API_TOKENS": tokens}
    ways = {name: way for name, way in WAYS.items() if verb in way.verbs}
    found = {(name, role): happened(way, VERBS[verb], users[role]) for name, way in ways.items() for role in ROLES}
    assert found == {
        (name, who): (role.in_admin if way.in_admin else role.anywhere)
        for name, way in ways.items()
        for who, role in ROLES.items()
    }


@pytest.mark.parametrize("name", [name for name in WAYS if name.startswith(("admin", "api"))])
def test_nobody_is_let_in_without_logging_in(name: str) -> None:
    for verb in WAYS[name].verbs:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"{__name__}.client", lambda _user: Client())
            assert not happened(WAYS[name], VERBS[verb], User(pk=0))


@pytest.mark.parametrize("role", ROLES)
def test_payloads_are_shown_to_those_who_may_see_them(role: str) -> None:
    verb = VERBS["view_payload"]
    user, task = make_user(role, verb), make_task("ERROR", payload={"name": "Ada Lovelace"})
    shown = {
        "admin": client(user).get(f"/admin/dbtaskqueue/task/{task.pk}/change/").content.decode(),
        "api": client(user).get(f"/api/tasks/{task.pk}").content.decode(),
    }
    known = {way: "Ada Lovelace" in text for way, text in shown.items()}
    expected = ROLES[role]
    may_look = expected.superuser or role.startswith("only this")
    assert known == {"admin": may_look and expected.in_admin, "api": may_look}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_way_in_and_a_permission_of_its_own(verb: str) -> None:
    assert verb in EFFECTS
    assert verb == "view_payload" or any(verb in way.verbs for way in WAYS.values())
    assert Permission.objects.filter(content_type__app_label=OURS, codename=VERBS[verb].permission).count() == 1
    sharing = {name for name, other in VERBS.items() if other.permission == VERBS[verb].permission}
    assert sharing in ({verb}, {"pause", "resume"})


@pytest.mark.parametrize("verb", VERBS)
def test_the_one_question_behind_all_of_it(verb: str) -> None:
    users = {role: make_user(role, VERBS[verb]) for role in ROLES}
    assert {role: can_operate(user, VERBS[verb], QUEUE) for role, user in users.items()} == {
        name: role.anywhere for name, role in ROLES.items()
    }
    assert not can_operate(AnonymousUser(), VERBS[verb])


@pytest.mark.parametrize("verb", [*ID_VERBS, "pause", "resume"])
def test_the_command_line_may_do_everything(verb: str) -> None:
    task = situation(verb)
    command = {"mark_poison": "poison"}.get(verb, verb.replace("_", "-"))
    on = [QUEUE] if verb in ("purge", "pause", "resume") else ["--id", str(task.pk)]
    said = ["--reason", "why", *([] if verb in ("pause", "resume") else ["--yes"])]
    given = [part for name, text in GIVEN.get(verb, {}).items() for part in (f"--{name.replace('_', '-')}", text)]
    call_command("taskqueue", command, *on, *said, *given, "--json")
    assert EFFECTS[verb][1]()
