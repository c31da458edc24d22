"""Enqueue many: one statement per 5,000 rows, one transaction for all of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any, NoReturn

from asgiref.sync import sync_to_async
from django.db import transaction

from django_dbtaskqueue import notifier
from django_dbtaskqueue.conf import QueueSettings
from django_dbtaskqueue.exceptions import DuplicateTask, EnqueueError, PayloadError
from django_dbtaskqueue.flow import calls, groups
from django_dbtaskqueue.flow.arguments import ON_DUPLICATE, check_choice, joined, options_of, row_of
from django_dbtaskqueue.flow.capacity import room
from django_dbtaskqueue.flow.enqueue import queue_settings
from django_dbtaskqueue.flow.shards import route
from django_dbtaskqueue.session import Session, aliases_of, model_for

Row = dict[str, Any]

CHUNK = 5000  # rows of one statement: what bounds the memory of an enqueue_many


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

    On a queue with shards each shard has a transaction of its own: all or none per shard.

    A bad item raises ``EnqueueError``, for its payload ``PayloadError``, naming the item and the path, and nothing is
    written; ``on_invalid="reject"`` leaves it out and says so in the report instead. Of items with the same reference
    ``on_duplicate="replace"`` keeps the last one.
    """
    check_choice("on_duplicate", on_duplicate, ON_DUPLICATE)
    check_choice("on_invalid", on_invalid, ("error", "reject"))
    sessions = {alias: Session.on(alias, model_for(queue)) for alias in aliases_of(queue, using)}
    settings = queue_settings(queue, next(iter(sessions)))
    counts = {"enqueued": 0, "ignored": 0, "replaced": 0}
    rejections: list[Rejection] = []
    numbered = enumerate(items)
    with ExitStack() as stack:
        for alias in sessions:
            stack.enter_context(transaction.atomic(using=alias))
        while chunk := list(islice(numbered, CHUNK)):
            shares: dict[str, list[Row]] = {alias: [] for alias in sessions}
            for alias, row in _rows(chunk, settings, list(sessions), rejections if on_invalid == "reject" else None):
                shares[alias].append(row)
            for alias, rows in shares.items():
                with room(sessions[alias], queue, settings.capacity, len(rows), timeout):
                    _insert_chunk(sessions[alias], queue, rows, on_duplicate, keep_due=keep_due, counts=counts)
        if counts["enqueued"] or counts["replaced"]:
            for session in sessions.values():
                notifier.after_commit(session.connection, queue)
    return EnqueueReport(**counts, rejections=tuple(rejections))


def _insert_chunk(
    session: Session,
    queue: str,
    rows: list[Row],
    on_duplicate: str,
    *,
    keep_due: bool,
    counts: dict[str, int],
) -> None:
    if not rows:
        return
    if on_duplicate == "replace":  # one statement may not touch a row twice: the last one wins
        last = list({row["reference_number"] or id(row): row for row in rows}.values())
        counts["replaced"] += len(rows) - len(last)
        rows = last
    timed = any(row["delay"] is not None or row["run_at"] is not None or row["ttl"] is not None for row in rows)
    grouped = {row["group_key"] for row in rows if row["group_key"] is not None}
    sql = session.sql.insert_many(on_duplicate, timed=timed, grouped=bool(grouped), keep_due=keep_due)
    groups.lock(session, queue, grouped)
    written = session.run(sql, {"queue_name": queue, "rows": _json(session, rows, timed=timed)})
    new = sum(1 for _, is_new in written if is_new)
    groups.regroup(session, queue, grouped)
    if written:
        ids = [task_id for task_id, _ in written] if calls.watched() else []
        calls.after_commit(session.connection, queue, "put", len(written), ids)
    counts["enqueued"] += new
    counts["replaced"] += len(written) - new
    if len(written) < len(rows):
        if on_duplicate != "ignore":
            _raise_duplicate(session, queue, rows, {task_id for task_id, _ in written})
        counts["ignored"] += len(rows) - len(written)


def _raise_duplicate(session: Session, queue: str, rows: list[Row], written: set[int]) -> NoReturn:
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
    twice = (reference for reference, times in Counter(references).items() if times > 1)
    raise DuplicateTask(queue, next(twice, references[0]))  # no longer held by anybody: it was, at the insert


def _json(session: Session, rows: list[Row], *, timed: bool) -> str:
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
    chunk: list[tuple[int, Any]], settings: QueueSettings, aliases: list[str], rejections: list[Rejection] | None
) -> Iterator[tuple[str, Row]]:
    """Check items and yield (where to, row)."""
    for index, item in chunk:
        options: Mapping[str, Any] = {}
        try:
            options = options_of(index, item)
            row = row_of(options, settings)
        except EnqueueError as error:
            named = _named(index, error)
            if rejections is None:
                raise named from None
            rejections.append(Rejection(index, options.get("reference"), named))
            continue
        spread = len(aliases) > 1
        yield (route(settings, row["reference_number"], options.get("payload")) if spread else aliases[0]), row


def _named(index: int, error: EnqueueError) -> EnqueueError:
    """Return the error with the item's place in it."""
    place = f"items[{index}]"
    if isinstance(error, PayloadError):
        return PayloadError(error.reason, path=joined(f"{place}.payload", error.path))
    return error if str(error).startswith(place) else EnqueueError(f"{place}: {error}")


async def aenqueue_many(queue: str, items: Iterable[Any], **options: Any) -> EnqueueReport:
    """The async twin of ``enqueue_many``, with the same arguments and promises."""
    return await sync_to_async(enqueue_many)(queue, items, **options)
