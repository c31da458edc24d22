"""What each verb does to a task of each status, and who may use it, by every road that leads to it.

One table says what is expected, whatever the road. A new road is a line in ``ROADS``; a verb without a line in
``TARGETS`` or ``EFFECTS`` fails. A test goes along one road, or with one verb along all, and names every cell that is
wrong.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.auth.models import AnonymousUser, Permission, User
from django.core.exceptions import PermissionDenied
from django.core.management import call_command
from django.db import transaction
from django.test import Client
from django.urls import include, path
from django.utils import timezone

from django_dbtaskqueue.core.states import BY_VERB, Status
from django_dbtaskqueue.models import AuditEntry, BulkOperation, DeletedTasks, Poller, Queue, Signal, Task, TaskHistory
from django_dbtaskqueue.models.control import IN_EFFECT
from django_dbtaskqueue.operations import actions, bulk, queue_control
from django_dbtaskqueue.operations.actions import ActionRequest
from django_dbtaskqueue.operations.permissions import Actor, Verb, can_operate
from django_dbtaskqueue.operations.verb_inputs import VerbOptions
from django_dbtaskqueue.operations.verbs import BULK_VERBS, ID_VERBS, TASK_VERBS, VERBS
from tests.factories import QUEUE, make_task

urlpatterns = [path("admin/", admin.site.urls), path("api/", include("django_dbtaskqueue.api.urls"))]
pytestmark = [pytest.mark.django_db(databases=["default", "sqlite"]), pytest.mark.urls(__name__)]
OURS, TOKEN, WHY, DAY = "dbtaskqueue", "a-token", "why", timedelta(days=1)
TASKS, QUEUES, POLLERS = (f"/admin/dbtaskqueue/{name}/" for name in ("task", "queue", "poller"))
# What each verb is given, as options and as people write them.
NOW = VerbOptions(
    older_than=timedelta(0), delay=2 * DAY, priority=7, queue="letters", payload={"name": "Bob"}, signal="go"
)
GIVEN: dict[str, dict[str, Any]] = {
    "housekeep": {"older_than": "0s", "to": "history"},
    "snooze": {"for": "2d"},
    "change_priority": {"priority": "7"},
    "move": {"to_queue": "letters"},
    "edit": {"payload": '{"name": "Bob"}'},
    "signal": {"signal": "go"},
}

# -- what is expected --------------------------------------------------------------------------------------------------

GONE, NO_CHANGE = None, "as it was"
ANY = dict.fromkeys(Status, GONE)
# Each verb: the statuses that it changes, and where they lead. It leaves tasks of another status as they are.
TARGETS: dict[str, dict[Any, str | None]] = {
    "reprocess": {"ERROR": "CREATED"},
    "mark_poison": {"ERROR": "POISON"},
    "unpoison": {"POISON": "ERROR"},
    "kick": {"POISON": "CREATED"},
    "cancel": {"CREATED": "POISON", "PROCESSING": "POISON"},
    "run_now": {"CREATED": "CREATED"},
    "snooze": {"CREATED": "CREATED"},
    "change_priority": {"CREATED": "CREATED"},
    "move": {"CREATED": "CREATED"},
    "signal": {"CREATED": "CREATED", "PROCESSING": "PROCESSING"},
    "edit": {"ERROR": "CREATED", "POISON": "CREATED"},
    "release": {"PROCESSING": "CREATED"},
    "housekeep": {"COMPLETED": GONE, "ERROR": GONE, "POISON": GONE},
    "delete": ANY,
    "purge": ANY,
}


def due(row: Task) -> bool:
    return row.ready_time is not None and row.ready_time == row.next_process_time <= timezone.now() + DAY / 2


def due_with_a_new_budget(row: Task) -> bool:
    return due(row) and (row.attempt, row.poller_instance, row.finish_time) == (0, None, None)


# Each verb: what is true of a task that it changed, if that stays.
CHANGED: dict[str, Callable[[Task], bool]] = {
    "reprocess": due_with_a_new_budget,
    "mark_poison": lambda row: row.ready_time is None and row.final_status == "POISON",
    "unpoison": lambda row: row.ready_time is None and row.final_status == "ERROR",
    "kick": due_with_a_new_budget,
    "cancel": lambda row: (row.ready_time, row.poller_instance) == (None, None) and row.finish_time is not None,
    "run_now": due,
    "snooze": lambda row: row.ready_time is not None and row.ready_time > timezone.now() + 1.5 * DAY,
    "change_priority": lambda row: row.priority == 7,
    "move": lambda row: row.queue == "letters",
    "signal": lambda row: Signal.objects.using(row._state.db).filter(task_id=row.pk, name="go").count() == 1,
    "edit": lambda row: due_with_a_new_budget(row) and row.payload == {"name": "Bob"},
    "release": lambda row: due(row) and row.poller_instance is None,
}


def paused() -> bool:
    return Queue.objects.filter(IN_EFFECT, name=QUEUE).exists()


# Each verb on something else than tasks: how its effect is seen.
EFFECTS: dict[str, Callable[[], bool]] = {
    "pause": paused,
    "resume": lambda: not paused(),
    "change_settings": lambda: Queue.objects.filter(name=QUEUE, overrides__batch_size=7).exists(),
    "control_pollers": lambda: Poller.objects.filter(requested_command="drain").exists(),
}


# -- the roads ---------------------------------------------------------------------------------------------------------


def client(user: Any) -> Client:
    """Return the user's client, logged in once: sessions are cookies here, and survive a rollback."""
    if "client" not in vars(user):
        user.client = Client()
        if user.pk:
            user.client.force_login(user)
    found: Client = user.client
    return found


def posted(user: Any, where: str, **given: Any) -> Any:
    return client(user).post(f"/api/{where}", json.dumps(given), content_type="application/json")


def work(alias: str = "default") -> None:
    while bulk.turn(alias):
        pass


def search_of(verb: str, tasks: list[Task]) -> str:
    return f"queue:{QUEUE}" if verb == "purge" else "id:" + ",".join(str(task.pk) for task in tasks)


def rows(tasks: list[Task]) -> Any:
    return Task.objects.using(tasks[0]._state.db).filter(pk__in=[task.pk for task in tasks])


def by_queryset(user: Any, verb: str, tasks: list[Task]) -> int:
    chosen = rows(tasks)
    if verb == "housekeep":
        return int(chosen.housekeep(older_than=timedelta(0)))
    if verb == "kick":
        return int(chosen.kick(100))
    return int(getattr(chosen, {"release": "release_all"}.get(verb, verb))())


def by_verb(user: Any, verb: str, tasks: list[Task]) -> int:
    """As ``actions`` does it: only the tasks that are read with the verb's condition."""
    return ID_VERBS[verb].run(list(rows(tasks)), NOW)


def by_act(user: Any, verb: str, tasks: list[Task]) -> int:
    return actions.act(rows(tasks), ActionRequest(ID_VERBS[verb], WHY, NOW), Actor(user, "code")).changed


def by_bulk(user: Any, verb: str, tasks: list[Task]) -> int:
    alias = str(tasks[0]._state.db)
    started = bulk.start(verb, search_of(verb, tasks), user, WHY, alias, options=NOW, source="code")
    work(alias)
    started.refresh_from_db()
    return started.changed


def command(*words: str) -> Any:
    out = io.StringIO()
    call_command("taskqueue", *words, "--json", stdout=out, no_color=True)
    return json.loads(out.getvalue())


def words_of(verb: str, tasks: list[Task], *, search: bool) -> list[str]:
    name = {"mark_poison": "poison"}.get(verb, verb.replace("_", "-"))
    given = [part for key, text in GIVEN.get(verb, {}).items() for part in (f"--{key.replace('_', '-')}", text)]
    ids = [part for task in tasks for part in ("--id", str(task.pk))]
    which = [QUEUE] if verb == "purge" else ["--filter", search_of(verb, tasks)] if search else ids
    return [name, *which, *given]


def by_command_ids(user: Any, verb: str, tasks: list[Task]) -> None:
    command(*words_of(verb, tasks, search=False), "--reason", WHY, "--yes")


def by_command_search(user: Any, verb: str, tasks: list[Task]) -> None:
    command(*words_of(verb, tasks, search=True), "--reason", WHY, "--yes")


def by_command_background(user: Any, verb: str, tasks: list[Task]) -> None:
    command(*words_of(verb, tasks, search=True), "--reason", WHY, "--yes", "--background")
    assert BulkOperation.objects.latest("pk").state == "WAITING"
    command("bulk", "run")


def by_admin(user: Any, verb: str, tasks: list[Task]) -> None:
    chosen = [task.pk for task in tasks]
    data = {"action": verb, "_selected_action": chosen, "confirm": "yes", "reason": WHY, **GIVEN.get(verb, {})}
    client(user).post(TASKS, data)


def by_admin_search(user: Any, verb: str, tasks: list[Task]) -> None:
    data = {"action": verb, "select_across": "1", "confirm": "yes", "reason": WHY, **GIVEN.get(verb, {})}
    client(user).post(f"{TASKS}?q={search_of(verb, tasks)}", data)
    work()


def by_admin_purge(user: Any, verb: str, tasks: list[Task]) -> None:
    client(user).post(QUEUES, {"purge": QUEUE, "typed": QUEUE, "reason": WHY})
    work()


def by_admin_queue(user: Any, verb: str, tasks: list[Task]) -> None:
    client(user).post(QUEUES, {"action": verb, "_selected_action": QUEUE, "confirm": "yes", "reason": WHY})


def by_admin_settings(user: Any, verb: str, tasks: list[Task]) -> None:
    client(user).post(QUEUES, {"queue": QUEUE, "set": "batch_size", "value": "7", "reason": WHY})


def by_admin_poller(user: Any, verb: str, tasks: list[Task]) -> None:
    client(user).post(POLLERS, {"action": "drain", "_selected_action": "p1", "confirm": "yes", "reason": WHY})


def by_api_ids(user: Any, verb: str, tasks: list[Task]) -> None:
    given = {"payload": NOW.payload} if verb == "edit" else GIVEN.get(verb, {})
    posted(user, f"tasks/{verb}/ids", ids=[task.pk for task in tasks], reason=WHY, **given)


def by_token(user: Any, verb: str, tasks: list[Task]) -> None:
    caller = User(username=user.username)
    caller.client = Client(headers={"Authorization": f"Bearer {TOKEN}{user.pk}"})  # type: ignore[attr-defined]
    by_api_ids(caller, verb, tasks)


def by_api_search(user: Any, verb: str, tasks: list[Task]) -> None:
    posted(user, f"tasks/{verb}/search", q=search_of(verb, tasks), reason=WHY, **GIVEN.get(verb, {}))
    work()


def by_api_purge(user: Any, verb: str, tasks: list[Task]) -> None:
    posted(user, f"queues/{QUEUE}/purge", confirm=QUEUE, reason=WHY)
    work()


def by_api_queue(user: Any, verb: str, tasks: list[Task]) -> None:
    posted(user, f"queues/{QUEUE}/{'start' if verb == 'resume' else verb}", reason=WHY)


def by_api_settings(user: Any, verb: str, tasks: list[Task]) -> None:
    posted(user, f"queues/{QUEUE}/settings", values={"batch_size": 7}, reason=WHY)


def by_api_poller(user: Any, verb: str, tasks: list[Task]) -> None:
    posted(user, "pollers/p1/drain", reason=WHY)


def by_queue_act(user: Any, verb: str, tasks: list[Task]) -> None:
    actor = Actor(user, "code")
    if verb == "change_settings":
        queue_control.change_settings(QUEUE, {"batch_size": 7}, actor, reason=WHY)
    else:
        {"pause": queue_control.pause_queues, "resume": queue_control.resume_queues}[verb]([QUEUE], actor, reason=WHY)


def by_poller_act(user: Any, verb: str, tasks: list[Task]) -> None:
    queue_control.command_pollers(["p1"], "drain", Actor(user, "code"), reason=WHY)


def by_command_queue(user: Any, verb: str, tasks: list[Task]) -> None:
    command(verb, QUEUE, "--reason", WHY)


@dataclass(frozen=True)
class Road:
    """A road to a verb, what its records call it, who may go along it, and where it leads on SQLite, too."""

    use: Callable[[Any, str, list[Task]], int | None]
    verbs: tuple[str, ...]
    source: str = ""  # of the record; none is written without it
    users: str = "all"  # or "staff", or "none": it knows no user
    background: bool = False  # the record has no ids, and Django's log names the operation
    on_sqlite: bool = False
    asked: Callable[[Any, str, list[Task]], int | None] | None = None  # how many would change


def asked_admin(user: Any, verb: str, tasks: list[Task]) -> int | None:
    chosen = [task.pk for task in tasks]
    page = client(user).post(TASKS, {"action": verb, "_selected_action": chosen, "recount": "1", **GIVEN.get(verb, {})})
    found = re.search(r"(\d+) would change", page.content.decode())
    return int(found[1]) if found else None


def asked_api(user: Any, verb: str, tasks: list[Task]) -> int:
    answer = posted(user, f"tasks/{verb}/preview", q=search_of(verb, tasks), **GIVEN.get(verb, {}))
    return int(answer.json()["would_change"]["count"])


def asked_command(user: Any, verb: str, tasks: list[Task]) -> int:
    return int(command(*words_of(verb, tasks, search=True), "--dry-run")["would_change"])


def asked_act(user: Any, verb: str, tasks: list[Task]) -> int | None:
    found = actions.preview(rows(tasks), ActionRequest(ID_VERBS[verb], options=NOW)).eligible
    return found and found.number


def asked_bulk(user: Any, verb: str, tasks: list[Task]) -> int | None:
    found = bulk.preview(verb, search_of(verb, tasks), str(tasks[0]._state.db), options=NOW).eligible
    return found and found.number


MANY = tuple(TASK_VERBS)
OF_QUERYSETS = tuple(verb for verb in ID_VERBS if hasattr(Task.objects, verb) and verb != "delete")
ROADS: dict[str, Road] = {
    "queryset": Road(by_queryset, (*OF_QUERYSETS, "release"), users="none", on_sqlite=True),
    "verb": Road(by_verb, tuple(ID_VERBS), users="none", on_sqlite=True),
    "act": Road(by_act, (*MANY, "edit"), "code", on_sqlite=True, asked=asked_act),
    "bulk operation": Road(by_bulk, tuple(BULK_VERBS), "code", background=True, on_sqlite=True, asked=asked_bulk),
    "command ids": Road(by_command_ids, (*MANY, "edit"), "command", users="none"),
    "command search": Road(by_command_search, tuple(BULK_VERBS), "command", users="none", asked=asked_command),
    "command background": Road(by_command_background, tuple(BULK_VERBS), "command", users="none", background=True),
    "admin action": Road(by_admin, (*MANY, "edit"), "admin", users="staff", asked=asked_admin),
    "admin search": Road(by_admin_search, MANY, "admin", users="staff", background=True),
    "admin purge": Road(by_admin_purge, ("purge",), "admin", users="staff", background=True),
    "api ids": Road(by_api_ids, (*MANY, "edit"), "api"),
    "api token": Road(by_token, (*MANY, "edit"), "api"),
    "api search": Road(by_api_search, MANY, "api", background=True, asked=asked_api),
    "api purge": Road(by_api_purge, ("purge",), "api", background=True),
}
OTHER_ROADS: dict[str, Road] = {  # to what is no task
    "admin queues": Road(by_admin_queue, ("pause", "resume"), "admin", users="staff"),
    "admin settings": Road(by_admin_settings, ("change_settings",), "admin", users="staff"),
    "admin pollers": Road(by_admin_poller, ("control_pollers",), "admin", users="staff"),
    "api queues": Road(by_api_queue, ("pause", "resume"), "api"),
    "api settings": Road(by_api_settings, ("change_settings",), "api"),
    "api pollers": Road(by_api_poller, ("control_pollers",), "api"),
    "queue act": Road(by_queue_act, ("pause", "resume", "change_settings"), "code"),
    "poller act": Road(by_poller_act, ("control_pollers",), "code"),
    "command": Road(by_command_queue, ("pause", "resume"), "command", users="none"),
}


@pytest.fixture(autouse=True)
def _rule(settings: Any) -> None:
    settings.SESSION_ENGINE = "django.contrib.sessions.backends.signed_cookies"
    settings.DBTASKQUEUE = {
        "QUEUES": {QUEUE: {}, "letters": {}, "apart": {}},
        "API": True,
        "CAN_OPERATE": f"{__name__}.deny_the_denied",
    }


def deny_the_denied(user: Any, verb: str, queue: str) -> bool:
    return not user.username.startswith("all, not on")


@contextmanager
def taken_back(alias: str = "default") -> Iterator[None]:
    with transaction.atomic(), transaction.atomic(using=alias):
        yield
        for each in {"default", alias}:
            transaction.set_rollback(True, using=each)


def with_token(users: list[User], settings: Any) -> None:
    tokens = {user.username: hashlib.sha256(f"{TOKEN}{user.pk}".encode()).hexdigest() for user in users}
    settings.DBTASKQUEUE = {**settings.DBTASKQUEUE, "API_TOKENS": tokens}


def make_one(status: str, alias: str = "default", **columns: Any) -> Task:
    """A waiting task is due tomorrow, so that it can be told to run now."""
    later = {"ready_time": DAY} if status == "CREATED" else {}
    return make_task(status, using=alias, payload={"name": "Ada"}, **later, **columns)


# -- what a verb does to a status --------------------------------------------------------------------------------------


def became(before: dict[str, Any], task: Task | None, verb: str) -> str | None:
    """Return the status that a task has now, or what else there is to say of it."""
    if task is None:
        return GONE
    if {name: getattr(task, name) for name in before} == before:
        return NO_CHANGE
    return task.status if verb in CHANGED and CHANGED[verb](task) else f"{task.status}, but not as it should be"


@pytest.mark.parametrize(
    ("road", "alias"),
    [(name, alias) for name, road in ROADS.items() for alias in ["default", "sqlite"][: 1 + road.on_sqlite]],
)
def test_a_verb_does_the_same_by_every_road(road: str, alias: str, settings: Any) -> None:
    """Given a task of each status, and as many that are not chosen, then only the verb's own change, as recorded."""
    way, user, wrong = ROADS[road], User.objects.create_superuser("ada"), []
    with_token([user], settings)
    if alias == "sqlite":
        settings.DBTASKQUEUE = {"QUEUES": {name: {"database": "sqlite"} for name in (QUEUE, "letters", "apart")}}
    tasks = [make_one(status, alias, reference=f"{status} one") for status in Status]
    others = [make_one(status, alias, queue="apart") for status in Status]
    before = {row.pop("id"): row for row in Task.objects.using(alias).values()}
    for verb in way.verbs:
        expected: dict[int, Any] = {task.pk: TARGETS[verb].get(task.status, NO_CHANGE) for task in tasks}
        number = sum(status is not NO_CHANGE for status in expected.values())
        one_by_one = [[task] for task in tasks] if verb == "edit" else [tasks]
        with taken_back(alias):
            asked = [way.asked(user, verb, chosen) for chosen in one_by_one] if way.asked else [number]
            if list(Task.objects.using(alias).order_by("pk").values_list("pk", "status")) != [
                (pk, row["status"]) for pk, row in sorted(before.items())
            ]:
                wrong.append((verb, "the question changes tasks"))
            if sum(filter(None, asked)) != number:
                wrong.append((verb, f"{asked} would change"))
            counts = [way.use(user, verb, chosen) for chosen in one_by_one]
            now = Task.objects.using(alias).in_bulk()
            found = {pk: became(before[pk], now.get(pk), verb) for pk in before}
            wrong += [
                (verb, before[pk]["status"], found[pk], "instead of", target)
                for pk, target in (expected | dict.fromkeys([task.pk for task in others], NO_CHANGE)).items()
                if found[pk] != target
            ]
            if (said := [count for count in counts if count is not None]) and sum(said) != number:
                wrong.append((verb, f"returned {said} for {number}"))
            wrong += [(verb, fault) for fault in faults_of_record(way, verb, user, number, alias)]
            moved, deleted = (model._default_manager.using(alias) for model in (TaskHistory, DeletedTasks))
            gone = (moved.count(), sum(deleted.values_list("count", flat=True)))
            if gone != (number * (verb == "housekeep"), number * (verb in ("delete", "purge"))):
                wrong.append((verb, f"{gone} moved and deleted"))
    assert wrong == []
    assert set(way.verbs) <= TARGETS.keys()


def faults_of_record(way: Road, verb: str, user: User, number: int, alias: str) -> Iterator[str]:
    """Yield what is wrong with the audit of one use of a verb, and with Django's log."""
    entries = list(AuditEntry.objects.using(alias).filter(verb=verb))
    if not way.source:
        if entries:
            yield "there is a record"
        return
    counts = [sum(getattr(entry, name) for entry in entries) for name in ("changed", "skipped")]
    if counts != [number, len(Status) - number]:
        yield f"{counts} changed and skipped in the record"
    facts = {(entry.source, entry.reason, entry.actor == user.username) for entry in entries}
    if facts != {(way.source, WHY, way.users != "none")}:
        yield f"the record says {facts}"
    flag = DELETION if BY_VERB[ID_VERBS[verb].edge or verb].target is None else CHANGE
    logged = LogEntry.objects.filter(user=user, action_flag=flag, content_type__model="task").count()
    if logged != (0 if way.background or way.users == "none" else number):
        yield f"{logged} entries in Django's log"


def test_every_verb_has_a_line_in_the_tables_a_road_and_a_permission_of_its_own() -> None:
    assert TARGETS.keys() == ID_VERBS.keys()
    assert TARGETS.keys() | EFFECTS.keys() == VERBS.keys() - {"view_payload"}
    assert {
        verb for road in (*ROADS.values(), *OTHER_ROADS.values()) for verb in road.verbs
    } == TARGETS | EFFECTS.keys()
    permissions = Permission.objects.filter(content_type__app_label=OURS).values_list("codename", flat=True)
    for name, verb in VERBS.items():
        assert list(permissions).count(verb.permission) == 1, name
        sharing = {other.name for other in VERBS.values() if other.permission == verb.permission}
        assert sharing in ({name}, {"pause", "resume"})


# -- who may -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Role:
    """Who tries: which permissions, and where they suffice."""

    permissions: Callable[[str], Any]  # of the verb's own permission -> a filter of our permissions
    may: str = "no"  # or "yes", or "outside the admin"
    staff: bool = True
    active: bool = True
    superuser: bool = False


def everything(_codename: str) -> Any:
    return Permission.objects.filter(content_type__app_label=OURS)


def nothing(_codename: str) -> Any:
    return Permission.objects.none()


def looking(_codename: str) -> Any:
    return everything("").filter(codename__startswith="view_").exclude(codename="view_payload")


def own(codename: str) -> Any:
    """To look, and the verb's own permission; to edit a payload, a user must also be allowed to see it."""
    both = ["edit_payload_task", "view_payload"]
    return looking("") | everything("").filter(codename__in=both if codename == both[0] else [codename])


def others(codename: str) -> Any:
    return everything("").exclude(codename=codename)


ROLES: dict[str, Role] = {
    "nothing": Role(nothing),
    "looking": Role(looking),
    "all but this": Role(others),
    "only this": Role(own, may="yes"),
    "only this, not staff": Role(own, may="outside the admin", staff=False),
    "all, inactive": Role(everything, active=False),
    "all, not on this queue": Role(everything),
    "superuser": Role(nothing, may="yes", superuser=True),
}
# What holds for "all but this" holds for those with less; the first test goes along every road as a superuser.
TRAVELLERS = [name for name in ROLES if name not in ("nothing", "looking", "superuser")]


def make_user(name: str, verb: Verb) -> User:
    role = ROLES[name]
    user = User.objects.create_user(name, is_staff=role.staff, is_active=role.active, is_superuser=role.superuser)
    user.user_permissions.set(role.permissions(verb.permission))
    return User.objects.get(pk=user.pk)


def state() -> list[Any]:
    """Return all that the verbs change."""
    return [list(model._default_manager.order_by("pk").values()) for model in (Task, Queue, Signal, Poller)]


@pytest.mark.parametrize("verb", [*TARGETS, *EFFECTS])
def test_a_verb_is_done_for_those_who_may_and_for_nobody_else(verb: str, settings: Any) -> None:
    """What is refused changes nothing, and is recorded only where it was tried task by task."""
    users = {role: make_user(role, VERBS[verb]) for role in TRAVELLERS}
    with_token([*users.values()], settings)
    users["nobody"] = User(pk=0)
    tasks = [make_one(next(iter(TARGETS[verb])))] if verb in TARGETS else []
    Poller.objects.create(instance="p1", state="RUNNING", queues=[QUEUE])
    if verb == "resume":
        queue_control.pause([QUEUE], by="somebody")
    before, wrong = state(), []
    for name, road in [*ROADS.items(), *OTHER_ROADS.items()]:
        if verb not in road.verbs or road.users == "none":
            continue
        for who, user in users.items():
            if who == "nobody" and road.source == "code":
                continue
            may = who != "nobody" and ROLES[who].may in (
                ["yes"] if road.users == "staff" else ["yes", "outside the admin"]
            )
            with taken_back(), suppress(PermissionDenied):
                road.use(user, verb, tasks)
                entries = AuditEntry.objects.filter(verb=verb)
                found = {"done": state() != before, "recorded": entries.filter(reason=WHY, changed__gt=0).exists()}
                if set(found.values()) != {may} or (may and verb in EFFECTS and not EFFECTS[verb]()):
                    wrong.append((name, who, found))
                if not may and ROLES.get(who, ROLES["nothing"]).permissions is not everything and entries.exists():
                    wrong.append((name, who, "the refusal is recorded"))
    assert wrong == []


@pytest.mark.parametrize("verb", EFFECTS)
def test_the_command_line_may_do_the_rest_too(verb: str) -> None:
    if verb == "resume":
        queue_control.pause([QUEUE], by="somebody")
    for road in OTHER_ROADS.values():
        if road.users == "none" and verb in road.verbs:
            road.use(None, verb, [])
            assert EFFECTS[verb]()


def test_the_one_question_behind_all_of_it() -> None:
    for verb in VERBS.values():
        with taken_back():
            users = {role: make_user(role, verb) for role in ROLES}
            found = {role: can_operate(user, verb, QUEUE) for role, user in users.items()}
            assert found == {name: role.may != "no" for name, role in ROLES.items()}, verb.name
            assert not can_operate(AnonymousUser(), verb)  # type: ignore[arg-type]


def test_pages_offer_each_verb_to_those_who_may() -> None:
    """On the list of tasks, and on the page of a task that it would change."""
    tasks = {status: make_one(status) for status in Status}
    offer, wrong = re.compile(r'name="action" value="(\w+)"'), []
    for name, verb in TASK_VERBS.items():
        user = make_user("only this", verb)
        page = tasks[next(iter(TARGETS[name]))].pk
        for address in ("", f"{page}/change/"):
            offered = set(offer.findall(client(user).get(f"{TASKS}{address}").content.decode()))
            wrong += [] if offered == {name} else [(name, address, offered)]
        user.delete()
    assert wrong == []


def test_payloads_are_shown_to_those_who_may_see_them() -> None:
    task, known = make_task("ERROR", payload={"name": "Ada Lovelace"}), {}
    for role in ROLES:
        user = make_user(role, VERBS["view_payload"])
        for road, address in (("admin", f"{TASKS}{task.pk}/change/"), ("api", f"/api/tasks/{task.pk}")):
            known[road, role] = "Ada Lovelace" in client(user).get(address).content.decode()
    shown = {"only this": {"admin", "api"}, "only this, not staff": {"api"}, "superuser": {"admin", "api"}}
    assert known == {(road, role): road in shown.get(role, ()) for role in ROLES for road in ("admin", "api")}
