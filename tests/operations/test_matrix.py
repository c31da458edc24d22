"""What each verb does to a task of each status, and who may use it, by every road that leads to it.

One table says what is expected, whatever the road. A new road is a line in ``ROADS``; a verb without a line in
``TARGETS`` or ``EFFECTS`` fails. A test goes along one road, or with one verb along all, and names each wrong cell.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from html import unescape
from itertools import product
from typing import Any

import pytest
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.auth.models import AnonymousUser, Permission, User
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.test import Client
from django.utils import timezone

from django_dbtaskqueue.core.states import BY_VERB, Status
from django_dbtaskqueue.models import AuditEntry, BulkOperation, Poller, Queue, Step, Task, TaskHistory
from django_dbtaskqueue.models.control import IN_EFFECT
from django_dbtaskqueue.operations import actions, bulk, lookup, permissions, queue_control
from django_dbtaskqueue.operations.actions import ActionRequest
from django_dbtaskqueue.operations.permissions import ENQUEUE_COPY, Actor, Verb, by_name
from django_dbtaskqueue.operations.schedules import SCHEDULE_VERBS
from django_dbtaskqueue.operations.verbs import BULK_VERBS, ID_VERBS, QUEUE_VERBS, TASK_VERBS, VerbOptions
from tests.factories import QUEUE, make_task
from tests.operations.site import POLLERS, QUEUES, TASKS, data, logged_in, post, refused, work
from tests.support import minute_counts, taken_back

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"])
VERBS: dict[str, Verb] = {**ID_VERBS, **QUEUE_VERBS}
VERBS |= by_name(permissions.CHANGE_SETTINGS, permissions.CONTROL_POLLERS, permissions.VIEW_PAYLOAD)
TOKEN, WHY, DAY = "a-token", "why", timedelta(days=1)
# What each verb is given, as options and as people write them.
THERE = {"queue": "letters", "payload": {"name": "Bob"}, "signal": "go"}
NOW = VerbOptions(older_than=timedelta(0), delay=2 * DAY, priority=7, **THERE)
GIVEN: dict[str, dict[str, Any]] = {
    "housekeep": {"older_than": "0s", "to": "history"},
    "snooze": {"for": "2d"},
    "change_priority": {"priority": "7"},
    "move": {"to_queue": "letters"},
    "edit": {"payload": '{"name": "Bob"}'},
    "signal": {"signal": "go"},
}

GONE, NO_CHANGE = None, "as it was"
# Each verb: the statuses that it changes, and where they lead. It leaves tasks of another status as they are.
TARGETS: dict[str, dict[Any, str | None]] = {
    "reprocess": {"ERROR": "CREATED"},
    "mark_poison": {"ERROR": "POISON"},
    "unpoison": {"POISON": "ERROR"},
    "kick": {"POISON": "CREATED"},
    "cancel": {"CREATED": "POISON", "PROCESSING": "POISON"},
    **{verb: {"CREATED": "CREATED"} for verb in ("run_now", "snooze", "change_priority", "move")},
    "signal": {"CREATED": "CREATED", "PROCESSING": "PROCESSING"},
    "edit": {"ERROR": "CREATED", "POISON": "CREATED"},
    "release": {"PROCESSING": "CREATED"},
    "housekeep": {"COMPLETED": GONE, "ERROR": GONE, "POISON": GONE},
    **{verb: dict.fromkeys(Status, GONE) for verb in ("delete", "purge")},
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
    "signal": lambda row: Step.objects.using(row._state.db).filter(task_id=row.pk, name="go").count() == 1,
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


Use = Callable[[Any, str, list[Task]], Any]


def browser(user: Any) -> Client:
    return logged_in(user) if user.pk else Client()


def search_of(verb: str, tasks: list[Task]) -> str:
    return f"queue:{QUEUE}" if verb == "purge" else "id:" + ",".join(str(task.pk) for task in tasks)


def rows(tasks: list[Task]) -> Any:
    return Task.objects.using(tasks[0]._state.db).filter(pk__in=ids(tasks))


def ids(tasks: list[Task]) -> list[int]:
    return [task.pk for task in tasks]


def by_queryset(user: Any, verb: str, tasks: list[Task]) -> int:
    given = {"housekeep": {"older_than": timedelta(0)}, "kick": {"n": 100}}.get(verb, {})
    return int(getattr(rows(tasks), "release_all" if verb == "release" else verb)(**given))


def by_reference(user: Any, verb: str, tasks: list[Task]) -> int:
    return sum(getattr(lookup, verb)(QUEUE, task.reference) for task in tasks)


def by_act(user: Any, verb: str, tasks: list[Task]) -> int:
    return actions.act_on_ids(
        rows(tasks), ids(tasks), ActionRequest(ID_VERBS[verb], WHY, NOW), Actor(user, "code")
    ).changed


def by_bulk(user: Any, verb: str, tasks: list[Task]) -> None:
    bulk.start(verb, search_of(verb, tasks), user, WHY, str(tasks[0]._state.db), options=NOW, source="code")


def words_of(verb: str, tasks: list[Task], *, search: bool = True) -> list[Any]:
    name = {"mark_poison": "poison"}.get(verb, verb.replace("_", "-"))
    given = [part for key, text in GIVEN.get(verb, {}).items() for part in (f"--{key.replace('_', '-')}", text)]
    chosen = [part for task in tasks for part in ("--id", task.pk)]
    which = [QUEUE] if verb == "purge" else ["--filter", search_of(verb, tasks)] if search else chosen
    return [name, *which, *given]


def by_command(*flags: str, search: bool = True) -> Use:
    def use(user: Any, verb: str, tasks: list[Task]) -> None:
        data(*words_of(verb, tasks, search=search), "--reason", WHY, "--yes", *flags)
        if "--background" in flags:
            assert BulkOperation.objects.latest("pk").state == "WAITING"
            data("bulk", "run")

    return use


def filled(text: Any, verb: str, tasks: list[Task]) -> Any:
    return text.format(verb=verb, search=search_of(verb, tasks)) if isinstance(text, str) else text


def by_page(address: str, **form: str) -> Use:
    def use(user: Any, verb: str, tasks: list[Task]) -> Any:
        answers = {name: filled(text, verb, tasks) for name, text in form.items()} or {"_selected_action": ids(tasks)}
        given = {"action": verb, "confirm": "yes", "reason": WHY, **GIVEN.get(verb, {}), **answers}
        return browser(user).post(filled(address, verb, tasks), given)

    return use


def by_api(where: str, **body: Any) -> Use:
    def use(user: Any, verb: str, tasks: list[Task]) -> Any:
        answers = {name: filled(value, verb, tasks) for name, value in body.items()}
        return post(browser(user), filled(where, verb, tasks), reason=WHY, **answers, **GIVEN.get(verb, {}))

    return use


def by_api_ids(user: Any, verb: str, tasks: list[Task], caller: Client | None = None) -> Any:
    given = {"payload": NOW.payload} if verb == "edit" else GIVEN.get(verb, {})
    return post(caller or browser(user), f"tasks/{verb}/ids", ids=ids(tasks), reason=WHY, **given)


def by_token(user: Any, verb: str, tasks: list[Task]) -> Any:
    return by_api_ids(user, verb, tasks, Client(headers={"Authorization": f"Bearer {TOKEN}{user.pk}"}))


def by_control(user: Any, verb: str, tasks: list[Task]) -> None:
    actor = Actor(user, "code")
    if verb == "change_settings":
        queue_control.change_settings(QUEUE, {"batch_size": 7}, actor, reason=WHY)
    elif verb == "control_pollers":
        queue_control.command_pollers(["p1"], "drain", actor, reason=WHY)
    else:
        queue_control.apply_to_queues(VERBS[verb], [QUEUE], actor, reason=WHY)


def asked_admin(user: Any, verb: str, tasks: list[Task]) -> int:
    answers = {"action": verb, "_selected_action": ids(tasks), "recount": "1", **GIVEN.get(verb, {})}
    found = re.search(r"(\d+) would change", browser(user).post(TASKS, answers).content.decode())
    return int(found[1]) if found else 0


def asked_api(user: Any, verb: str, tasks: list[Task]) -> int:
    answer = post(browser(user), f"tasks/{verb}/preview", q=search_of(verb, tasks), **GIVEN.get(verb, {}))
    return int(answer.json()["eligible"]["number"])


def asked_command(user: Any, verb: str, tasks: list[Task]) -> int:
    return int(data(*words_of(verb, tasks), "--dry-run")["eligible"]["number"])


@dataclass(frozen=True)
class Road:
    """A road to a verb, what its records call it, who may go along it, and where it leads on SQLite, too."""

    use: Use
    verbs: tuple[str, ...]
    source: str = ""  # of the record; none is written without it
    users: str = "all"  # or "staff", or "none": it knows no user
    background: bool = False  # the record has no ids, and Django's log names the operation
    on_sqlite: bool = False
    asked: Callable[[Any, str, list[Task]], int] | None = None  # how many would change


MANY = tuple(TASK_VERBS)
ONE_TOO = (*MANY, "edit")
OF_QUERYSETS = tuple(verb for verb in ID_VERBS if hasattr(Task.objects, verb) and verb != "delete")
SETTING, DRAIN = {"set": "batch_size", "value": "7"}, {"action": "drain", "_selected_action": "p1"}
ROADS: dict[str, Road] = {
    "queryset": Road(by_queryset, (*OF_QUERYSETS, "release"), users="none", on_sqlite=True),
    "lookup": Road(by_reference, ("reprocess", "cancel", "run_now", "delete"), users="none", on_sqlite=True),
    "act": Road(by_act, ONE_TOO, "code", on_sqlite=True),
    "bulk operation": Road(by_bulk, tuple(BULK_VERBS), "code", background=True, on_sqlite=True),
    "command ids": Road(by_command(search=False), ONE_TOO, "command", users="none"),
    "command search": Road(by_command(), tuple(BULK_VERBS), "command", users="none", asked=asked_command),
    "command background": Road(by_command("--background"), tuple(BULK_VERBS), "command", users="none", background=True),
    "admin action": Road(by_page(TASKS), ONE_TOO, "admin", users="staff", asked=asked_admin),
    "admin search": Road(by_page(TASKS + "?q={search}", select_across="1"), MANY, "admin", "staff", background=True),
    "admin purge": Road(by_page(QUEUES, purge=QUEUE, typed=QUEUE), ("purge",), "admin", "staff", background=True),
    "api ids": Road(by_api_ids, ONE_TOO, "api"),
    "api token": Road(by_token, ONE_TOO, "api"),
    "api search": Road(by_api("tasks/{verb}/search", q="{search}"), MANY, "api", background=True, asked=asked_api),
    "api purge": Road(by_api(f"queues/{QUEUE}/purge", confirm=QUEUE), ("purge",), "api", background=True),
}
OTHER_ROADS: dict[str, Road] = {  # to what is no task
    "admin queues": Road(by_page(QUEUES, _selected_action=QUEUE), ("pause", "resume"), "admin", users="staff"),
    "admin settings": Road(by_page(QUEUES, queue=QUEUE, **SETTING), ("change_settings",), "admin", users="staff"),
    "admin pollers": Road(by_page(POLLERS, **DRAIN), ("control_pollers",), "admin", users="staff"),
    "api queues": Road(by_api(f"queues/{QUEUE}" + "/{verb}"), ("pause", "resume"), "api"),
    "api settings": Road(by_api(f"queues/{QUEUE}/settings", values={"batch_size": 7}), ("change_settings",), "api"),
    "api pollers": Road(by_api("pollers/p1/drain"), ("control_pollers",), "api"),
    "queue act": Road(by_control, ("pause", "resume", "change_settings"), "code"),
    "poller act": Road(by_control, ("control_pollers",), "code"),
}


@pytest.fixture(autouse=True)
def _rule(settings: Any) -> None:
    settings.SESSION_ENGINE = "django.contrib.sessions.backends.signed_cookies"  # which survive a rollback
    queues = {name: {} for name in (QUEUE, "letters", "apart")}
    settings.DBTASKQUEUE |= {"QUEUES": queues, "CAN_OPERATE": f"{__name__}.deny_the_denied"}


def deny_the_denied(user: Any, verb: str, queue: str) -> bool:
    return not user.username.startswith("all, not on")


def with_token(users: list[User], settings: Any) -> None:
    tokens = {user.username: hashlib.sha256(f"{TOKEN}{user.pk}".encode()).hexdigest() for user in users}
    settings.DBTASKQUEUE = {**settings.DBTASKQUEUE, "API_TOKENS": tokens}


def make_one(status: str, alias: str = "default", **columns: Any) -> Task:
    """A waiting task is due tomorrow, so that it can be told to run now."""
    later = {"ready_time": DAY} if status == "CREATED" else {}
    return make_task(status, using=alias, payload={"name": "Ada"}, **later, **columns)


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
    others = [make_one(status, alias, queue="apart", reference=f"{status} one") for status in Status]
    before = {row.pop("id"): row for row in Task.objects.using(alias).values()}
    for verb in way.verbs:
        expected: dict[int, Any] = {task.pk: TARGETS[verb].get(task.status, NO_CHANGE) for task in tasks}
        number = sum(status is not NO_CHANGE for status in expected.values())
        one_by_one = [[task] for task in tasks] if verb == "edit" else [tasks]
        with taken_back(), taken_back(alias):
            asked = [way.asked(user, verb, chosen) for chosen in one_by_one] if way.asked else [number]
            if dict(rows(tasks + others).values_list("pk", "status")) != {pk: before[pk]["status"] for pk in before}:
                wrong.append((verb, "the question changes tasks"))
            if sum(asked) != number:
                wrong.append((verb, f"{asked} would change"))
            counts = [way.use(user, verb, chosen) for chosen in one_by_one]
            work(alias)
            now = Task.objects.using(alias).in_bulk()
            for pk, target in (expected | dict.fromkeys(ids(others), NO_CHANGE)).items():
                if (found := became(before[pk], now.get(pk), verb)) != target:
                    wrong.append((verb, before[pk]["status"], found, "instead of", target))
            if (said := [count for count in counts if isinstance(count, int)]) and sum(said) != number:
                wrong.append((verb, f"returned {said} for {number}"))
            wrong += [(verb, fault) for fault in faults_of_record(way, verb, user, number, alias)]
            moved, deleted = TaskHistory.objects.using(alias), minute_counts("deletion", alias)
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
    roads = (*ROADS.values(), *OTHER_ROADS.values())
    assert {verb for road in roads for verb in road.verbs} == TARGETS.keys() | EFFECTS.keys()
    for name, verb in VERBS.items():
        assert everything("").filter(codename=verb.permission).count() == 1, name
        sharing = {other.name for other in VERBS.values() if other.permission == verb.permission}
        assert sharing in ({name}, {"pause", "resume"})
    asked = {verb.permission for verb in (*VERBS.values(), *SCHEDULE_VERBS.values(), ENQUEUE_COPY)} | {"add_schedule"}
    made = {*everything("").values_list("codename", flat=True)}
    assert {name.partition("_")[0] for name in made - asked} == {"view"}, "no permission that no verb uses"


@dataclass(frozen=True)
class Role:
    """Who tries: which permissions, and where they suffice."""

    permissions: Callable[[str], Any]  # of the verb's own permission -> a filter of our permissions
    may: str = "no"  # or "yes", or "outside the admin"
    staff: bool = True
    active: bool = True
    superuser: bool = False


def everything(_codename: str) -> Any:
    return Permission.objects.filter(content_type__app_label="dbtaskqueue")


def looking(_codename: str) -> Any:
    return everything("").filter(codename__startswith="view_").exclude(codename="view_payload")


def own(codename: str) -> Any:
    """To look, and the verb's own permission; to edit a payload, a user must also be allowed to see it."""
    both = ["edit_payload_task", "view_payload"]
    return looking("") | everything("").filter(codename__in=both if codename == both[0] else [codename])


ROLES: dict[str, Role] = {
    "nothing": Role(lambda _codename: Permission.objects.none()),
    "looking": Role(looking),
    "all but this": Role(lambda codename: everything("").exclude(codename=codename)),
    "only this": Role(own, may="yes"),
    "only this, not staff": Role(own, may="outside the admin", staff=False),
    "all, inactive": Role(everything, active=False),
    "all, not on this queue": Role(everything),
    "superuser": Role(lambda _codename: Permission.objects.none(), may="yes", superuser=True),
}
# What holds for "all but this" holds for those with less; the first test goes along every road as a superuser. Some try
# each verb of a road; those who are judged whatever the verb is take turns.
ALWAYS = ("all but this", "only this")
IN_TURN = ("all, not on this queue", "only this, not staff", "all, inactive", "nobody")


def make_user(name: str, verb: Verb) -> User:
    role = ROLES[name]
    user = User.objects.create_user(name, is_staff=role.staff, is_active=role.active, is_superuser=role.superuser)
    user.user_permissions.set(role.permissions(verb.permission))
    return User.objects.get(pk=user.pk)


def answer_of(road: Road, user: User, verb: str, tasks: list[Task]) -> str:
    try:
        answer = road.use(user, verb, tasks)
    except PermissionDenied as error:
        return str(error)
    return unescape(answer.content.decode()) if hasattr(answer, "content") else ""


def state() -> list[Any]:
    return [list(model._default_manager.order_by("pk").values()) for model in (Task, Queue, Step, Poller)]


@pytest.mark.parametrize("verb", [*TARGETS, *EFFECTS])
def test_a_verb_is_done_for_those_who_may_and_for_nobody_else(verb: str, settings: Any) -> None:
    """What is refused changes nothing, says the same, and is recorded only where it was tried task by task."""
    users = {role: make_user(role, VERBS[verb]) for role in (*ALWAYS, *IN_TURN[:-1])}
    with_token([*users.values()], settings)
    users["nobody"] = User(pk=0)
    tasks = [make_one(next(iter(TARGETS[verb])))] if verb in TARGETS else []
    Poller.objects.create(instance="p1", state="RUNNING", queues=[QUEUE])
    if verb == "resume":
        queue_control.pause(QUEUE, "default", by="somebody")
    before, wrong = state(), []
    for name, road in [*ROADS.items(), *OTHER_ROADS.items()]:
        if verb not in road.verbs or road.users == "none":
            continue
        turn = road.verbs.index(verb) % len(IN_TURN)
        for who in (*ALWAYS, *(IN_TURN if len(road.verbs) < len(IN_TURN) else [IN_TURN[turn]])):
            if who == "nobody" and road.source == "code":
                continue
            suffices = ["yes"] if road.users == "staff" else ["yes", "outside the admin"]
            may = who != "nobody" and ROLES[who].may in suffices
            with taken_back():
                said = answer_of(road, users[who], verb, tasks)
                work()
                if who == "all but this" and f"{who} may not use {verb}" not in said:
                    wrong.append((name, who, said))
                entries = AuditEntry.objects.filter(verb=verb)
                found = {"done": state() != before, "recorded": entries.filter(reason=WHY, changed__gt=0).exists()}
                if set(found.values()) != {may} or (may and verb in EFFECTS and not EFFECTS[verb]()):
                    wrong.append((name, who, found))
                if not may and ROLES.get(who, ROLES["nothing"]).permissions is not everything and entries.exists():
                    wrong.append((name, who, "the refusal is recorded"))
    assert wrong == []


def test_the_one_question_behind_all_of_it() -> None:
    own_to_each = {name for name in ROLES if re.match("all but this|only this", name)}
    users = {role: make_user(role, VERBS["delete"]) for role in ROLES.keys() - own_to_each}
    for verb in VERBS.values():
        with taken_back():
            users |= {role: make_user(role, verb) for role in own_to_each}
            found = {role: Actor(user).may(verb, QUEUE) for role, user in users.items()}
            assert found == {name: role.may != "no" for name, role in ROLES.items()}, verb.name
            assert not Actor(AnonymousUser()).may(verb)  # type: ignore[arg-type]


def test_pages_offer_each_verb_to_those_who_may() -> None:
    tasks = {status: make_one(status) for status in Status}
    for name, verb in TASK_VERBS.items():
        user = make_user("only this", verb)
        for address in ("", f"{tasks[next(iter(TARGETS[name]))].pk}/change/"):
            shown = browser(user).get(f"{TASKS}{address}").content.decode()
            assert {*re.findall(r'name="action" value="(\w+)"', shown)} == {name}, address
        user.delete()


def test_code_that_cannot_be_called_is_named_by_the_check_and_where_it_is_asked(settings: Any, admin_user: Any) -> None:
    named = product(("CAN_OPERATE", "CAN_VIEW", "router", "strategy"), ("nowhere.rule", f"{__name__}.GIVEN"))
    for key, path in (*named, ("model", "nowhere.AbstractTask"), ("model", "testapp.Booking")):
        settings.DBTASKQUEUE = {"QUEUES": {"claims": {key: path}}} if key.islower() else {key: path}
        found = [(error.id, key in error.msg, path in error.msg) for error in run_checks(tags=["dbtaskqueue"])]
        assert found == [("dbtaskqueue.E003" if key == "model" else "dbtaskqueue.E005", True, True)]
        if key.isupper():
            assert Actor(admin_user).may(VERBS["pause"]), "no queue, nothing to ask"
            refused(key, Actor(admin_user).may, VERBS["pause"], "claims", error=ImproperlyConfigured)
