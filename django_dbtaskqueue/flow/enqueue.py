"""Enqueue: a task is a row in the caller's own transaction.

It commits or rolls back with the caller's business data, savepoints included; only the wake-up of the pollers waits
for the commit.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, NoReturn, cast

from asgiref.sync import sync_to_async
from django.db import transaction

from django_dbtaskqueue import conf, notifier
from django_dbtaskqueue import payload as json_payload
from django_dbtaskqueue.exceptions import DuplicateTask, EnqueueError, PayloadError, UnknownQueue
from django_dbtaskqueue.flow import groups
from django_dbtaskqueue.flow.arguments import check_choice, joined, options_of, row_of
from django_dbtaskqueue.flow.capacity import room
from django_dbtaskqueue.models import Queue, Task
from django_dbtaskqueue.session import Session

CHUNK = 5000  # rows of one statement of enqueue_many; what bounds its memory
ON_DUPLICATE = ("error", "ignore", "replace")
READ_BACK = (
    "id", "create_time", "ready_time", "next_process_time", "attempt", "reenqueue_attempt", "total_attempt",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rejection:
    """One item that ``enqueue_many(..., on_invalid="reject")`` left out."""

    index: int
    reference: str | None
    error: EnqueueError


@dataclass(frozen=True, slots=True)
class EnqueueReport:
    """What ``enqueue_many`` did, in numbers; ``rejections`` says why items were left out."""

    enqueued: int = 0
    ignored: int = 0
    replaced: int = 0
    rejections: tuple[Rejection, ...] = ()

    @property
    def rejected(self) -> int:
        """The number of items left out."""
        return len(self.rejections)


def enqueue(
    queue: str,
    reference: str | None = None,
    payload: Any = None,
    *,
    delay: timedelta | None = None,
    run_at: datetime | None = None,
    priority: int = 0,
    group: str | None = None,
    tag: str | None = None,
    ttl: timedelta | None = None,
    context: Mapping[str, Any] | None = None,
    on_duplicate: str = "error",
    keep_due: bool = False,
    lease: timedelta | None = None,
    timeout: timedelta | None = None,
    using: str | None = None,
) -> Task:
    """Insert one task on the caller's connection; it exists exactly if the caller's transaction commits.

    ``reference`` is the caller's business key, unique in its queue; None is never a duplicate. When it is taken:
    ``on_duplicate="error"`` raises ``DuplicateTask``, ``"ignore"`` returns the task that holds it, ``"replace"``
    rewrites that task while it is CREATED (``keep_due=True`` leaves its due time) and raises ``DuplicateTask`` when it
    is not. The transaction stays usable in each case.

    Due at ``run_at`` plus ``delay``, never in the past. ``priority``: lower first. ``ttl`` counts from the due time.
    ``group``: tasks of one group are processed one at a time, in order. ``tag``: only pollers started with it take the
    task. ``lease`` overrides the queue's. ``timeout``: how long to wait for room in a queue with a capacity.

    Raises ``UnknownQueue``, ``PayloadError``, ``DuplicateTask``, ``QueueFull`` before or instead of any write.
    """
    session = Session.of(queue, using)
    settings = queue_settings(queue, session.connection.alias)
    row = row_of(
        {
            "reference": reference, "payload": payload, "delay": delay, "run_at": run_at, "priority": priority,
            "group": group, "tag": tag, "ttl": ttl, "context": context, "lease": lease,
        },
        settings,
    )  # fmt: skip
    check_choice("on_duplicate", on_duplicate, ON_DUPLICATE)
    if settings.capacity is None and row["group_key"] is None:
        return _insert(session, queue, row, on_duplicate, keep_due=keep_due)
    with room(session, queue, settings.capacity, 1, timeout):
        return _insert_grouped(session, queue, row, on_duplicate, keep_due=keep_due)


def _insert_grouped(session: Session, queue: str, row: dict[str, Any], on_duplicate: str, *, keep_due: bool) -> Task:
    """Insert under the group's lock: of each group, one task at most is in line."""
    group = row["group_key"]
    if group is None:
        return _insert(session, queue, row, on_duplicate, keep_due=keep_due)
    with session.atomic():
        groups.lock(session, queue, [group])
        task = _insert(session, queue, row, on_duplicate, keep_due=keep_due)
        groups.regroup(session, queue, [group])
    return task


def _insert(session: Session, queue: str, row: dict[str, Any], on_duplicate: str, *, keep_due: bool) -> Task:
    timed = row["delay"] is not None or row["run_at"] is not None or row["ttl"] is not None
    sql = session.sql.insert(on_duplicate, timed=timed, grouped=row["group_key"] is not None, keep_due=keep_due)
    if row["run_at"] is not None:
        row["run_at"] = session.time_text(row["run_at"])
    params = {**row, "queue_name": queue}
    for _ in range(3):  # the row in the way may go between the two statements
        written = session.run(sql, params)
        if written:
            notifier.after_commit(session.connection, queue)
            return _task(session, queue, row, written[0])
        found = session.run(session.sql.find, params)
        if found and on_duplicate == "ignore":
            return _existing(session, found[0][0])
        if found:
            raise DuplicateTask(queue, row["reference_number"], task_id=found[0][0], status=found[0][1])
    raise DuplicateTask(queue, row["reference_number"])


def _task(session: Session, queue: str, row: dict[str, Any], written: tuple[Any, ...]) -> Task:
    """Return the row just written as a model instance; columns not in hand are loaded when they are read."""
    values = dict(zip(READ_BACK, written, strict=True))
    if row["group_key"] is not None:
        del values["ready_time"]  # whether it is the head of its group is decided next
    if not session.postgresql:
        # A replaced task may be parked: it has no place in line.
        values |= {n: session.time(value) for n, value in values.items() if n.endswith("_time") and value is not None}
    values |= {
        "queue": queue,
        "reference": row["reference_number"],
        "status": "CREATED",
        "payload": None if row["payload"] is None else json_payload.loads(row["payload"]),
        "payload_type": row["payload_type"],
        "priority": row["priority"],
        "group_key": row["group_key"],
        "tag": row["tag"],
        "max_attempts": row["max_attempts"],
    }
    names = [field.attname for field in session.model._meta.concrete_fields if field.attname in values]
    return cast(Task, session.model.from_db(session.connection.alias, names, [values[name] for name in names]))


def _existing(session: Session, task_id: int) -> Task:
    return cast(Task, session.model._default_manager.using(session.connection.alias).get(pk=task_id))


def enqueue_many(
    queue: str,
    items: Iterable[Any],
    *,
    on_duplicate: str = "error",
    keep_due: bool = False,
    on_invalid: str = "error",
    timeout: timedelta | None = None,
    using: str | None = None,
) -> EnqueueReport:
    """Insert many tasks in one transaction (the caller's, if there is one): all of them or none.

    An item is a mapping of ``enqueue``'s arguments (``{"reference": …, "payload": …, "delay": …}``), a pair
    ``(reference, payload)``, or a payload object of its own class (dataclass or pydantic model). ``items`` may be an
    endless-looking iterator: it is read in chunks of 5,000 rows.

    A bad item raises ``PayloadError`` naming the item and the path, and nothing is written;
    ``on_invalid="reject"`` leaves it out and says so in the report instead.
    """
    check_choice("on_duplicate", on_duplicate, ON_DUPLICATE)
    check_choice("on_invalid", on_invalid, ("error", "reject"))
    session = Session.of(queue, using)
    settings = queue_settings(queue, session.connection.alias)
    counts = {"enqueued": 0, "ignored": 0, "replaced": 0}
    rejections: list[Rejection] = []
    numbered = enumerate(items)
    with transaction.atomic(using=session.connection.alias):
        while chunk := list(islice(numbered, CHUNK)):
            rows = list(_rows(chunk, settings, rejections if on_invalid == "reject" else None))
            with room(session, queue, settings.capacity, len(rows), timeout):
                _insert_chunk(session, queue, rows, on_duplicate, keep_due=keep_due, counts=counts)
        if counts["enqueued"] or counts["replaced"]:
            notifier.after_commit(session.connection, queue)
    return EnqueueReport(**counts, rejections=tuple(rejections))


def _insert_chunk(
    session: Session,
    queue: str,
    rows: list[dict[str, Any]],
    on_duplicate: str,
    *,
    keep_due: bool,
    counts: dict[str, int],
) -> None:
    if on_duplicate == "replace":  # one statement may not touch a row twice: the last one wins
        rows = list({row["reference_number"] or id(row): row for row in rows}.values())
    timed = any(row["delay"] is not None or row["run_at"] is not None or row["ttl"] is not None for row in rows)
    grouped = {row["group_key"] for row in rows if row["group_key"] is not None}
    sql = session.sql.insert_many(on_duplicate, timed=timed, grouped=bool(grouped), keep_due=keep_due)
    groups.lock(session, queue, grouped)
    written = session.run(sql, {"queue_name": queue, "rows": _json(session, rows, timed=timed)})
    new = sum(1 for _, is_new in written if is_new)
    groups.regroup(session, queue, grouped)
    counts["enqueued"] += new
    counts["replaced"] += len(written) - new
    if len(written) < len(rows):
        if on_duplicate != "ignore":
            _raise_duplicate(session, queue, rows, {task_id for task_id, _ in written})
        counts["ignored"] += len(rows) - len(written)


def _raise_duplicate(session: Session, queue: str, rows: list[dict[str, Any]], written: set[int]) -> NoReturn:
    """Name the first reference that was held by a task before, or that stands twice among the items."""
    references = [row["reference_number"] for row in rows if row["reference_number"] is not None]
    tasks = session.model._default_manager.using(session.connection.alias)
    holder = (
        tasks.filter(queue=queue, reference__in=references)
        .exclude(pk__in=written)
        .values("reference", "pk", "status")
        .first()
    )
    if holder is not None:
        raise DuplicateTask(queue, holder["reference"], task_id=holder["pk"], status=holder["status"])
    raise DuplicateTask(queue, next(ref for ref, times in Counter(references).items() if times > 1))


def _json(session: Session, rows: list[dict[str, Any]], *, timed: bool) -> str:
    """Return rows as one JSON array; payloads are JSON text already and are not parsed again."""
    dumps = json.dumps
    parts = []
    for row in rows:
        part = (
            f'{{"reference_number":{dumps(row["reference_number"])},"payload":{row["payload"] or "null"},'
            f'"payload_type":{dumps(row["payload_type"])},"priority":{row["priority"]},'
            f'"group_key":{dumps(row["group_key"])},"tag":{dumps(row["tag"])},'
            f'"context":{row["context"] or "null"},"max_attempts":{row["max_attempts"]},'
            f'"lease_seconds":{dumps(row["lease_seconds"])}'
        )
        if timed:
            run_at = None if row["run_at"] is None else session.time_text(row["run_at"])
            part += f',"delay":{dumps(row["delay"])},"run_at":{dumps(run_at)},"ttl":{dumps(row["ttl"])}'
        parts.append(part + "}")
    return f"[{','.join(parts)}]"


def _rows(
    chunk: list[tuple[int, Any]], settings: conf.QueueSettings, rejections: list[Rejection] | None
) -> Iterator[dict[str, Any]]:
    for index, item in chunk:
        options: Mapping[str, Any] = {}
        try:
            options = options_of(index, item)
            yield row_of(options, settings)
        except EnqueueError as error:
            named = _named(index, error)
            if rejections is None:
                raise named from None
            rejections.append(Rejection(index, options.get("reference"), named))


def _named(index: int, error: EnqueueError) -> EnqueueError:
    """Return the error with the item's place in it."""
    place = f"items[{index}]"
    if isinstance(error, PayloadError):
        return PayloadError(error.reason, path=joined(f"{place}.payload", error.path))
    return error if str(error).startswith(place) else EnqueueError(f"{place}: {error}")


def queue_settings(queue: str, alias: str) -> conf.QueueSettings:
    """Return what ``queue`` is set to; a queue made at runtime stands only in the ``Queue`` table."""
    try:
        return conf.queue_settings(queue)
    except UnknownQueue:
        if isinstance(queue, str) and Queue.objects.using(alias).filter(pk=queue).exists():
            return conf.default_settings(queue)
        raise


async def aenqueue(queue: str, reference: str | None = None, payload: Any = None, **options: Any) -> Task:
    """The async twin of ``enqueue``, with the same arguments and promises."""
    return await sync_to_async(enqueue)(queue, reference, payload, **options)


async def aenqueue_many(queue: str, items: Iterable[Any], **options: Any) -> EnqueueReport:
    """The async twin of ``enqueue_many``, with the same arguments and promises."""
    return await sync_to_async(enqueue_many)(queue, items, **options)
