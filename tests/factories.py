"""Rows as the flow leaves them: ask for a status, get lease, counters and times that fit it."""

from datetime import timedelta
from typing import Any

from django.db import connections, models
from django.db.models.functions import Now

from django_dbtaskqueue.core.states import COMPLETED, CREATED, ERROR, POISON, PROCESSING, TERMINAL, Status
from django_dbtaskqueue.models import Task

QUEUE, LEASE = "parcels", timedelta(minutes=1)
HOLDER = "poller-1:100:abc"


def make_task(status: Status | str = CREATED, *, using: str = "default", **columns: Any) -> Task:
    """Insert a task in ``status``; ``columns`` win over what is made up, and the rest is made to fit them.

    Written past the flow, straight into the table: the CHECK constraints judge it. Times default to the database's
    now; a ``timedelta`` given for a time column means that much after now (negative: before).
    """
    given = {name: Now() + value if isinstance(value, timedelta) else value for name, value in columns.items()}
    believable = {"queue": QUEUE, "status": str(status), **_shape(Status(status), given), **given}
    task = Task.objects.using(using).create(**believable)
    task.refresh_from_db(using=using)
    return task


def _shape(status: Status, given: dict[str, Any]) -> dict[str, Any]:
    attempt = given.get("attempt", _attempt(status, given))
    shape: dict[str, Any] = {"attempt": attempt, "total_attempt": given.get("reenqueue_attempt", 0) + attempt}
    if status in TERMINAL:
        shape |= {"ready_time": None, "finish_time": Now(), "final_status": str(status)}
    if status == CREATED and given.get("parked_by"):
        shape |= {"ready_time": None}
    elif status == CREATED and "ready_time" in given:
        shape |= {"next_process_time": given["ready_time"]}
    if shape["total_attempt"]:
        shape |= {"start_time": Now()}
    if status != CREATED and attempt:
        shape |= {"poller_instance": HOLDER, "next_process_time": Now() + LEASE}
    if status in (ERROR, POISON):
        shape |= {"process_result": f"made up: {status}"}
    return shape


def _attempt(status: Status, given: dict[str, Any]) -> int:
    return int(given.get("max_attempts", 5)) if status == ERROR else int(status in (PROCESSING, COMPLETED, POISON))


def age(delta: timedelta, *, using: str = "default", model: type[models.Model] = Task, **selection: Any) -> None:
    """Make rows older by ``delta``: each of their times moves that far into the past. The clock stays as it is."""
    times = [field.name for field in model._meta.get_fields() if isinstance(field, models.DateTimeField)]
    rows = model._default_manager.using(using).filter(**selection)
    rows.update(**{name: _earlier(name, delta, rows.db) for name in times})


def _earlier(name: str, delta: timedelta, using: str) -> Any:
    if connections[using].vendor == "postgresql":
        return models.F(name) - delta
    return models.Func(
        models.Value("%Y-%m-%d %H:%M:%f"),
        models.F(name),
        models.Value(f"{-delta.total_seconds():+.3f} seconds"),
        function="STRFTIME",
        output_field=models.DateTimeField(),
    )
