"""Look up tasks as an operator does: search, count, and the verbs by business key, as functions.

Verbs over a selection are the queryset's: ``search("mail", status="ERROR").reprocess()``, and so ``mark_poison``,
``unpoison``, ``kick``, ``cancel``, ``run_now``, ``release_all``, ``purge``, ``housekeep``. ``filter(pk__in=…)``: by id.
"""

from collections.abc import Callable, Collection, Iterable
from datetime import datetime

from django.db.models import Count
from django.utils.translation import gettext as _

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.overrides import overridden_settings
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db.session import Session, alias_for, aliases_of, model_for, only_alias
from django_dbtaskqueue.flow.placement import known_queues
from django_dbtaskqueue.flow.selection import free_references
from django_dbtaskqueue.models import AbstractTask, Queue, Task
from django_dbtaskqueue.models.querysets import TaskQuerySet

__all__ = ["cancel", "count_by_status", "delete", "exists", "find", "reprocess", "run_now", "search"]

Location = tuple[str, type[AbstractTask]]


def search(
    queue: str | None = None,
    *,
    status: str | None = None,
    reference: str | None = None,
    created_after: datetime | None = None,
    created_before: datetime | None = None,
    using: str | None = None,
) -> TaskQuerySet:
    """Return the tasks that match all arguments, the newest first: a queryset, so read it in pages or use its verbs.

    ``created_after`` is included, ``created_before`` is not. Without a queue: those in the common table; name one with
    its own table or database, a shard with ``using``. Raises ``UnknownQueue``, ``ValueError`` for an unknown status.
    """
    if status is not None and status not in tuple(Status):
        raise ValueError(f"{status!r} is not a status. Statuses are {', '.join(Status)}.")
    place = (alias_for("", using), Task) if queue is None else _places(queue, only_alias(queue, using))[0]
    tasks = tasks_on(*place)
    session = Session.on(tasks.db)
    given = {
        "queue": queue,
        "status": status,
        "reference": reference,
        "create_time__gte": created_after and session.comparable_time(created_after),
        "create_time__lt": created_before and session.comparable_time(created_before),
    }
    return tasks.filter(**{name: value for name, value in given.items() if value is not None}).order_by("-pk")


def count_by_status(queue: str | None = None) -> dict[str, dict[str, int]]:
    """Return how many tasks each queue has in each status, over all its databases: ``{queue: {status: number}}``.

    Every known queue and every status is there, also with 0. Reads each table once: use it for people, not in a loop.
    """
    none = dict.fromkeys(map(str, Status), 0)
    counts = {name: {**none} for name in ([queue] if queue is not None else known_queues())}
    for alias, model in _places(queue) if queue is not None else locations():
        tasks = tasks_on(alias, model).order_by().filter(**({} if queue is None else {"queue": queue}))
        for name, status, number in tasks.values_list("queue", "status").annotate(number=Count("pk")):
            counts.setdefault(name, {**none})[status] += number
    return counts


def places_of(queue: str, using: str | None = None) -> list[Location]:
    """Return each (database, table) that a queue has tasks in; of all its databases or of one."""
    return [(alias, model_for(queue)) for alias in aliases_of(queue, using)]


def locations(using: str | None = None) -> list[Location]:
    """Return those of all known queues, each once; of all databases or of one."""
    made = Queue.objects.using(alias_for("", None)).values_list("name", flat=True)
    found = dict.fromkeys(place for name in ("", *conf.settings_queues(), *made) for place in places_of(name))
    return [place for place in found if using is None or place[0] == alias_for("", using)]


def locations_on(using: str | None) -> list[Location]:
    """Return the databases and tables to look at, at least the common one."""
    return locations(using) or [(str(using), Task)]


def aliases_in(places: Iterable[Location]) -> list[str]:
    """Return the databases of some places, by name."""
    return sorted({alias for alias, _model in places})


def elsewhere(queues: Collection[str], tasks: TaskQuerySet, *, write: bool = False) -> str:
    """Return which databases of some queues, or of all if none is given, ``tasks`` leave out, in words; or nothing."""
    homes = {alias for queue in queues or conf.settings_queues() for alias in aliases_of(queue, write=write)}
    words = _("These are the tasks on database %(database)s. For %(others)s give --database; in the API, database.")
    others = ", ".join(sorted(homes - {tasks.db}))
    return words % {"database": tasks.db, "others": others} if others else ""


def exists(queue: str, reference: str) -> bool:
    """Whether the queue has a task with this reference, in any status. Raises ``UnknownQueue``, as all of these do."""
    return find(queue, reference) is not None


def find(queue: str, reference: str) -> AbstractTask | None:
    """Return the task with this reference, or None. A task in the history is not found: its reference is free again."""
    return next(filter(None, (tasks.first() for tasks in _named(queue, reference))), None)


def reprocess(queue: str, reference: str) -> bool:
    """ERROR → CREATED, due now, with a new budget of attempts. False when there is no such task, or not in ERROR."""
    return _change(queue, reference, TaskQuerySet.reprocess)


def run_now(queue: str, reference: str) -> bool:
    """Make a CREATED task due now. False when there is no such task, or it does not wait, or has no processor."""
    return _change(queue, reference, TaskQuerySet.run_now)


def cancel(queue: str, reference: str) -> bool:
    """CREATED or PROCESSING → POISON. If it runs, its lease is lost, and its poller tells it to stop within a second.

    False when there is no such task, or it has ended. ``on_duplicate="replace_running"`` puts another in its place.
    """
    return _change(queue, reference, TaskQuerySet.cancel)


def delete(queue: str, reference: str) -> bool:
    """Delete the task in any status and count the deletion; its poller gets ``LeaseLost``. False: there is none.

    On a queue with ``unique_over="history"`` it frees the reference, also of a task that has left the table.
    """
    freed = (free_references(alias, queue, [reference]) for alias in aliases_of(queue))
    return _change(queue, reference, TaskQuerySet.purge) or sum(freed) > 0


def _change(queue: str, reference: str, verb: Callable[[TaskQuerySet], int]) -> bool:
    return any(map(verb, _named(queue, reference)))


def _named(queue: str, reference: object) -> list[TaskQuerySet]:
    """Return the tasks with a reference, one or none, of each database that the queue has."""
    if not isinstance(reference, str):  # None would name all tasks without one
        raise TypeError(f"A reference is text, not {reference!r:.80}. Tasks without one are found by search().")
    return [tasks_on(*place).filter(queue=queue, reference=reference) for place in _places(queue)]


def _places(queue: str, using: str | None = None) -> list[Location]:
    overridden_settings(queue, aliases_of(queue)[0])
    return places_of(queue, using)


def tasks_on(alias: str, model: type[AbstractTask]) -> TaskQuerySet:
    """Return all tasks of one table of one database."""
    found: TaskQuerySet = model._default_manager.using(alias).all()
    return found
