"""What became of a Django task: ``TaskResult`` objects from rows and leases, and the ids that name them."""

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any
from zlib import crc32

from django.conf import settings as django_settings
from django.core.exceptions import SuspiciousOperation
from django.utils import timezone
from django.utils.crypto import constant_time_compare, salted_hmac

from django_dbtaskqueue.backend import compat
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core import json as json_payload
from django_dbtaskqueue.core.columns import HISTORY_COLUMNS
from django_dbtaskqueue.core.context import standbys
from django_dbtaskqueue.core.durations import id_readers
from django_dbtaskqueue.core.exceptions import TaskQueueError, dotted
from django_dbtaskqueue.core.lease import Lease

if TYPE_CHECKING:
    from django_dbtaskqueue.db.session import Session

RESULT_STATUSES = {
    "CREATED": compat.TaskResultStatus.READY,
    "PROCESSING": compat.TaskResultStatus.RUNNING,
    "COMPLETED": compat.TaskResultStatus.SUCCESSFUL,
    "ERROR": compat.TaskResultStatus.FAILED,
    "POISON": compat.TaskResultStatus.FAILED,
}
TEXT_ERROR = dotted(TaskQueueError)  # of a failure that is only text
UNKNOWN_WORKER = "unknown"  # of an attempt that was charged and has left no record: its process died
decorated: dict[str, compat.AnyTask] = {}  # each function with @task, by dotted path


def new_result(task: compat.AnyTask, result_id: str, payload: Mapping[str, Any], **facts: Any) -> compat.AnyResult:
    """Return a result: READY, unless ``facts`` say otherwise."""
    value = facts.pop("value", None)
    times = dict.fromkeys(("enqueued_at", "started_at", "last_attempted_at", "finished_at"))
    metadata = {"raw_metadata": payload.get("metadata") or {}} if compat.HAS_METADATA else {}
    fields = {"status": compat.TaskResultStatus.READY, "errors": [], "worker_ids": [], **times, **metadata, **facts}
    given = {"args": payload["args"], "kwargs": payload["kwargs"], "backend": task.backend}
    result: compat.AnyResult = compat.TaskResult(task=task, id=result_id, **given, **fields)
    object.__setattr__(result, "_return_value", value)
    return result


def leased_result(
    path: str,
    lease: Lease,
    status: compat.TaskResultStatus = compat.TaskResultStatus.RUNNING,
    value: object = None,
    errors: Sequence[compat.TaskError] = (),
) -> compat.AnyResult:
    """Return the result of a task that has a lease here; of a later attempt, with what the database knows."""
    result_id = id_of_lease(lease)
    ended = status != compat.TaskResultStatus.RUNNING
    if lease.total_attempt > 1 and (stored := stored_result(result_id)) is not None:
        return stored
    payload = _checked_payload(lease.payload)
    return new_result(
        _task(path, lease.queue, lease.priority, payload), result_id, payload, status=status, value=value,
        enqueued_at=lease.create_time, started_at=lease.start_time, last_attempted_at=lease.start_time,
        finished_at=timezone.now() if ended else None, worker_ids=[lease.poller_instance],
        errors=list(errors),
    )  # fmt: skip


def stored_result(result_id: str) -> compat.AnyResult | None:
    """Return the result with this id as the database has it; None if the task is deleted."""
    with suppress(compat.TaskResultDoesNotExist):
        return read_result(result_id)
    return None


def read_result(result_id: object) -> compat.AnyResult:
    """Return the result with this id, in one query. Raise ``TaskResultDoesNotExist``."""
    session, task_id = find_place(result_id)
    if not (row := _stored(session, task_id)):
        raise compat.TaskResultDoesNotExist(result_id)
    for column in HISTORY_COLUMNS:
        if row[column.name] is not None and column.type == "timestamptz":
            row[column.name] = session.time(row[column.name])
    path = row["payload_type"] or ""
    payload = _checked_payload(json_payload.loads(row["payload"] or "null"))
    failed = json.loads(row["attempts"] or "[]")  # of each: error type, traceback, poller, start, total attempt
    starts = [row["start_time"], *(start and session.time(start) for *_, start, _total in failed)]
    result = row["result"]
    return new_result(
        _task(path, row["queue"], row["priority"], payload), str(uuid.UUID(str(result_id))), payload,
        status=RESULT_STATUSES[row["status"]], value=None if result is None else json_payload.loads(result),
        enqueued_at=row["create_time"], started_at=min(filter(None, starts), default=None),
        last_attempted_at=row["start_time"], finished_at=row["finish_time"], worker_ids=_workers(row, failed),
        errors=[task_error(error_type, traceback) for error_type, traceback, *_ in failed],
    )  # fmt: skip


def _stored(session: "Session", task_id: int) -> dict[str, Any]:
    """Return what a table or the history has of a task, and its failed attempts; empty if it is deleted."""
    rows = session.run(session.sql.task_with_attempts, {"task_id": task_id, "location": session.location})
    return dict(zip((*(column.name for column in HISTORY_COLUMNS), "attempts"), rows[0], strict=True)) if rows else {}


def task_error(error_type: str, traceback: str) -> compat.TaskError:
    """Return one failure of a result; ``error_type`` is the dotted path of the exception's class, or empty."""
    return compat.TaskError(exception_class_path=error_type or TEXT_ERROR, traceback=traceback)


def _workers(row: Mapping[str, Any], failed: Sequence[tuple[str, str, str | None, str, int]]) -> list[str]:
    """Return the poller of each charged attempt. An attempt whose process died has left no record of its poller."""
    known = [poller or UNKNOWN_WORKER for _, _, poller, *_ in failed]
    if row["poller_instance"] and row["total_attempt"] not in {total for *_, total in failed}:
        known.append(row["poller_instance"])
    return [UNKNOWN_WORKER] * (row["attempt"] - len(known)) + known


def _task(path: str, queue: str, priority: int, payload: Mapping[str, Any]) -> compat.AnyTask:
    if (task := decorated.get(path)) is None:
        raise SuspiciousOperation(
            f"The task names the function {path!r}, and no @task of this process has that path. Functions are not "
            "imported by the name in a row: define it in the tasks.py of an installed app, or import its module."
        )
    run_after = payload.get("run_after")
    try:
        return task.using(
            queue_name=queue,
            priority=max(compat.TASK_MIN_PRIORITY, min(-priority, compat.TASK_MAX_PRIORITY)),
            run_after=None if run_after is None else datetime.fromisoformat(run_after),
            backend=payload.get("backend", compat.DEFAULT_TASK_BACKEND_ALIAS),
        )
    except (compat.InvalidTask, compat.InvalidTaskBackend):  # it was moved to another queue, or the settings changed
        return task


def _checked_payload(payload: object) -> dict[str, Any]:
    if (
        isinstance(payload, dict)
        and isinstance(payload.get("args"), list)
        and isinstance(payload.get("kwargs"), dict)
        and isinstance(payload.get("metadata", {}), dict)
    ):
        return payload
    shown = json_payload.short_repr(payload)
    raise TaskQueueError(f'The payload of a Django task is {{"args": [...], "kwargs": {{...}}}}, and this is {shown}.')


# -- ids -------------------------------------------------------------------------------------------------------------
# An id is a UUID (version 8): the number of the task in 48 bits, its table in 12, and 62 bits that only a process with
# the project's SECRET_KEY can make. So nobody who sees one id can guess another. SQLite gives the number of a task that
# was rolled back to the next one: there the payload has a random text, of which the 62 bits are made, too.

ID_BITS, PLACE_MASK, SEAL_BITS = 48, (1 << 12) - 1, 62
NONCE = "nonce"


def result_id_of(alias: str, location: str, task_id: int, payload: object) -> str:
    """Return the id of a task: ``location`` is its model."""
    return str(_uuid(alias, location, task_id, _nonce(payload), django_settings.SECRET_KEY))


def _nonce(payload: object) -> str:
    return str(payload.get(NONCE, "")) if isinstance(payload, Mapping) else ""


def _nonces(session: "Session", task_id: int) -> Iterator[str]:
    if session.postgresql:
        yield ""
    yield _nonce(json_payload.loads(_stored(session, task_id).get("payload") or "null"))


def id_of_lease(lease: Lease) -> str:
    """Return the id of the task that a lease holds."""
    from django_dbtaskqueue.db.session import model_for

    return result_id_of(lease.port.alias, model_for(lease.queue)._meta.label_lower, lease.id, lease.payload)


def _uuid(alias: str, location: str, task_id: int, nonce: str, secret: str | bytes) -> uuid.UUID:
    sealed = f"{alias}:{location}:{task_id}{nonce}"
    digest = salted_hmac("django_dbtaskqueue.backend", sealed, secret=secret, algorithm="sha256").digest()
    seal = int.from_bytes(digest[:8]) >> (64 - SEAL_BITS)
    return uuid.UUID(int=task_id << 128 - ID_BITS | 8 << 76 | _place(alias, location) << 64 | 0b10 << SEAL_BITS | seal)


def _place(alias: str, location: str) -> int:
    return crc32(f"{alias}:{location}".encode()) & PLACE_MASK


def task_place_of(text: str) -> tuple[str, str, int] | None:
    """Return the task that this is the id of; None for other text, and for an id that was made up."""
    with suppress(compat.TaskResultDoesNotExist):
        session, task_id = find_place(text)
        return session.connection.alias, session.location, task_id
    return None


id_readers.append(task_place_of)


def find_place(result_id: object) -> "tuple[Session, int]":
    """Return where the task of an id is; raise ``TaskResultDoesNotExist`` for an id that was not given out."""
    from django_dbtaskqueue.db.session import Session, aliases_of, model_for

    try:
        given = result_id if isinstance(result_id, uuid.UUID) else uuid.UUID(str(result_id))
    except ValueError:
        raise compat.TaskResultDoesNotExist(result_id) from None
    task_id = given.int >> 128 - ID_BITS
    secrets = (django_settings.SECRET_KEY, *django_settings.SECRET_KEY_FALLBACKS)
    places = ((alias, model_for(queue)) for queue in conf.settings_queues() for alias in aliases_of(queue))
    primaries = {standby: primary for primary, standby in standbys.get().items()}
    for alias, model in dict.fromkeys(places):
        session, location, home = Session.on(alias, model), model._meta.label_lower, primaries.get(alias, alias)
        for nonce in _nonces(session, task_id) if given.int >> 64 & PLACE_MASK == _place(home, location) else ():
            made = (_uuid(home, location, task_id, nonce, secret) for secret in secrets)
            if any(constant_time_compare(str(one), str(given)) for one in made):
                return session, task_id
    raise compat.TaskResultDoesNotExist(result_id)
