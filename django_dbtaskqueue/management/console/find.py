"""One task by its name: in the tables of all known queues, then in the history."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError
from django.db.models import QuerySet
from django.db.models.functions import Now

from django_dbtaskqueue.db.session import alias_for, model_for
from django_dbtaskqueue.models import TaskHistory
from django_dbtaskqueue.operations.bounded_reads import statement_timeout
from django_dbtaskqueue.operations.lookup import Location, locations_on
from django_dbtaskqueue.operations.serializers import detail, detail_of_history


def one(name: str, using: str | None, queue: str | None) -> tuple[Any, dict[str, Any]]:
    """Return a task and what there is to say of it, by an id or ``queue/reference``; one in the history last.

    Looks in the table of ``queue``, or in all that known queues have. Raises ``CommandError`` when none is found, or
    more than one table has a task of that id.
    """
    named, slash, reference = name.partition("/")
    queue = named if slash else queue
    by: dict[str, Any] = {"queue": queue} if queue else {}
    places = [_place(queue, using)] if queue else list(dict.fromkeys(locations_on(using)))
    by |= {"reference": reference} if slash else {"pk": int(name) if name.isdecimal() else -1}
    if live := _found([model._default_manager.using(alias).filter(**by) for alias, model in places]):
        return _only(live, name), detail(live[0], payload=True)
    if "pk" in by:
        by["task_id"] = by.pop("pk")
    aliases = dict.fromkeys(alias for alias, _model in places)
    moved = _found([TaskHistory.objects.using(alias).filter(**by).order_by("-pk") for alias in aliases])
    if not moved:
        raise CommandError(f"There is no task {name!r}, in the history neither. Give an id, or queue/reference.")
    return moved[0], detail_of_history(moved[0], payload=True)


def _place(queue: str, using: str | None) -> Location:
    return alias_for(queue, using, write=False), model_for(queue)


def _found(selections: list[QuerySet[Any]]) -> list[Any]:
    found = []
    for rows in selections:
        with statement_timeout(rows.db):
            found += list(rows.annotate(clock=Now())[:1])
    return found


def _only(found: list[Any], name: str) -> Any:
    if len(found) > 1:
        tables = ", ".join(f"{task._meta.db_table} on {task._state.db} ({task.queue})" for task in found)
        raise CommandError(f"More than one table has a task {name}: {tables}. Say which with --queue or --database.")
    return found[0]
