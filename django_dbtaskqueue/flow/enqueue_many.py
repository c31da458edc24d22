"""Enqueue many: one statement per 5,000 rows, one transaction for all of them.

PostgreSQL takes plain tasks by COPY, which costs less than an INSERT. COPY has no ON CONFLICT: it fails at a reference
that is taken, and an INSERT of the same rows then says which one it is. To ignore such references, a query looks first
whether there are any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any, NamedTuple, NoReturn, Self, Unpack

from asgiref.sync import sync_to_async
from django.db import IntegrityError, NotSupportedError, transaction

from django_dbtaskqueue.conf.overrides import queue_settings
from django_dbtaskqueue.conf.settings import QueueSettings
from django_dbtaskqueue.core.columns import OWN_COLUMNS, EnqueueManyOptions
from django_dbtaskqueue.core.context import enqueue_hook
from django_dbtaskqueue.core.exceptions import DuplicateTask, EnqueueError
from django_dbtaskqueue.core.sql.enqueue import REPLACE
from django_dbtaskqueue.core.unique import UniqueRule
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import Session, aliases_of, model_for
from django_dbtaskqueue.flow import groups, selection, usage
from django_dbtaskqueue.flow.chunks import DERIVED, WRITE, WRITE_TIMED, Batch, Chunks, Rejection, UniformRows
from django_dbtaskqueue.flow.dependencies import TaskKey
from django_dbtaskqueue.flow.enqueue import ON_DUPLICATE, Row, check_choice, insert_by_rule
from django_dbtaskqueue.flow.parents import Edge, Members, attach, checked_parents, members
from django_dbtaskqueue.flow.placement import (
    LEFT_TABLE,
    UNIQUE_OVER_HISTORY,
    PeriodTaken,
    check_timeout,
    checked_rule,
    claim_periods,
    free_capacity,
    free_references,
    in_period,
    own_columns,
    with_own_values,
    without_spent,
)

MIN_ROWS_TO_COPY = 200  # fewer do not pay for the savepoint
# PostgreSQL keeps 64 savepoints of a transaction in shared memory. With more, each reader of a row looks on disk.
MAX_SAVEPOINTS = 50


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
    unique: UniqueRule | str | None = None,
    on_duplicate: str = "error",
    keep_due: bool = False,
    on_invalid: str = "error",
    after: object = None,
    on_parent_failure: str = "hold",
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
    ``on_duplicate="replace"`` and ``"replace_running"`` keep the last one. ``unique``: the rule for items without a
    reference, as in ``enqueue``; ``on_duplicate`` is for those with one. ``after``: parents of each of the tasks, as in
    ``enqueue``.
    """
    options, queue = locals(), queue.value if isinstance(queue, Enum) else queue
    if enqueue_hook.around is not None and enqueue_hook.applies():
        return enqueue_hook.surround(queue, lambda: enqueue_many(**options))
    check_choice("on_duplicate", on_duplicate, ON_DUPLICATE)
    check_choice("on_invalid", on_invalid, ("error", "reject"))
    check_timeout(timeout)
    sessions = {alias: Session.on(alias, model_for(queue)) for alias in aliases_of(queue, using)}
    settings = queue_settings(queue, next(iter(sessions)))
    related = _related(settings, list(sessions), after, on_parent_failure, on_duplicate)
    rejections: list[Rejection] = []
    rule = settings.unique if unique is None else checked_rule(unique, None)
    chunks = Chunks(queue, items, settings, list(sessions), rejections if on_invalid == "reject" else None, rule)
    done = Counter(enqueued=0, ignored=0, replaced=0)
    savepoints = Counter(dict.fromkeys(sessions, MAX_SAVEPOINTS if on_duplicate not in REPLACE and not related else 0))
    with ExitStack() as stack:
        for alias in sessions:
            stack.enter_context(transaction.atomic(using=alias))
        for shares in chunks:
            for alias, share in shares.items():
                if rule is not None:
                    share, derived = _apart(share)
                    done.update(
                        _insert_unique(
                            sessions[alias], queue, derived, rule, settings.capacity, timeout, related=related
                        )
                    )
                if settings.unique_over == UNIQUE_OVER_HISTORY:
                    rows = share.rows() if isinstance(share, UniformRows) else share
                    share = without_spent(sessions[alias], queue, rows, on_duplicate)
                    done["ignored"] += len(rows) - len(share)
                with free_capacity(sessions[alias], queue, settings.capacity, len(share), timeout):
                    if not _copy(sessions[alias], queue, share, on_duplicate, savepoints, done):
                        one = _insert(sessions[alias], queue, share, on_duplicate, keep_due=keep_due, related=related)
                        done.update(one)
                if related is not None:
                    related.relate(sessions[alias], queue)
        if done["enqueued"] or done["replaced"]:
            for session in sessions.values():
                notify.after_commit(session.connection, queue, lost=on_duplicate == "replace_running")
    return EnqueueReport(**done, rejections=tuple(rejections))


async def aenqueue_many(queue: str, items: Iterable[Any], **options: Unpack[EnqueueManyOptions]) -> EnqueueReport:
    """The async twin of ``enqueue_many``, with the same arguments and promises."""
    return await sync_to_async(enqueue_many)(queue, items, **options)


def _apart(share: Batch) -> tuple[list[Row], list[Row]]:
    """Return the rows whose reference a caller gave, or that have none, and those whose reference a rule derived."""
    parts: tuple[list[Row], list[Row]] = ([], [])
    for row in share.rows() if isinstance(share, UniformRows) else share:
        parts[DERIVED in row].append(row)
    return parts


def _insert_unique(
    session: Session,
    queue: str,
    rows: list[Row],
    rule: UniqueRule,
    capacity: int | None,
    timeout: timedelta | None,
    *,
    related: _Related | None,
) -> Counter[str]:
    """Insert rows whose references a rule derived. If another producer began one's period first, begin again."""
    while True:
        taken = in_period(session, queue, rule, [row["reference_number"] for row in rows])
        if taken and rule.on_duplicate == "error":
            raise DuplicateTask(queue, min(taken), status=LEFT_TABLE, rule=rule.words)
        fresh = [row for row in rows if row["reference_number"] not in taken]
        with suppress(PeriodTaken), session.atomic(), free_capacity(session, queue, capacity, len(fresh), timeout):
            free_references(session, queue, rule, [row["reference_number"] for row in fresh])
            done = _insert(session, queue, fresh, rule.on_duplicate, keep_due=False, rule=rule, related=related)
            done["ignored"] += len(rows) - len(fresh)
            usage.after_commit(session.connection, {(queue, "ignored"): done["ignored"]})
            return done


def _by_rule(
    session: Session, queue: str, rows: list[Row], written: _Written, rule: UniqueRule, related: _Related | None
) -> Counter[str]:
    """Begin the periods of what was written. What was not is looked at one by one where a task may have started."""
    tasks = session.model._base_manager.using(session.connection.alias).filter(pk__in=written.ids)
    there = {str(reference) for reference in tasks.values_list("reference", flat=True)}
    claim_periods(session, queue, rule, sorted(there))
    others = [row for row in rows if row["reference_number"] not in there]
    done = Counter(enqueued=written.new, ignored=len(rows) - len(others) - written.number)
    if done["ignored"] and rule.on_duplicate == "error":
        raise DuplicateTask(queue, min(there), rule=rule.words)
    if not rule.until_started and rule.on_duplicate == "ignore":
        done["ignored"] += len(others)
        return done
    for row in others:
        task = insert_by_rule(session, queue, row, rule)
        done["enqueued" if not task.enqueue_note else "ignored"] += 1
        if related is not None and not task.enqueue_note:
            related.ids.append(task.pk)
    return done


class _Written(NamedTuple):
    """What one statement wrote, of these new ones, and the ids if they were asked for."""

    number: int
    new: int
    ids: list[int]

    @classmethod
    def of(cls, session: Session, answer: list[tuple[Any, ...]]) -> Self:
        if session.postgresql:
            number, new, ids = answer[0]
            return cls(number, new, ids or [])
        return cls(len(answer), sum(is_new for _, is_new in answer), [task_id for task_id, _ in answer])


@dataclass(slots=True)
class _Related:
    """What the tasks of one call wait for, and the block that takes note of them."""

    parents: dict[TaskKey, str] | None
    policy: str
    block: Members | None
    ids: list[int] = field(default_factory=list)  # of tasks that were inserted and are not related yet

    @property
    def held(self) -> bool:
        return self.parents is not None

    def relate(self, session: Session, queue: str) -> None:
        """Let the tasks wait that were inserted since the last call, and have the block take note of them."""
        keys = [TaskKey(session.location, task_id) for task_id in self.ids]
        self.ids.clear()
        if self.parents is not None:
            edges = [Edge(parent, key, name) for key in keys for parent, name in self.parents.items()]
            attach(session, edges, dict.fromkeys(keys, self.policy))
        if self.block is not None:
            self.block.add(session.connection.alias, queue, keys)


def _related(
    settings: QueueSettings, aliases: list[str], after: object, policy: str, on_duplicate: str
) -> _Related | None:
    block = members.get()
    if after is None:
        return None if block is None else _Related(None, policy, block)
    if len(aliases) > 1 or on_duplicate in REPLACE or settings.unique is not None:
        raise EnqueueError(
            "enqueue_many(after=…) does not go with shards, a rule of uniqueness or on_duplicate='replace'. Call "
            "enqueue(after=…) for each task."
        )
    return _Related(checked_parents(after, policy, settings, aliases[0], aliases[0])[1], policy, block)


def _insert(
    session: Session,
    queue: str,
    share: Batch,
    on_duplicate: str,
    *,
    keep_due: bool,
    rule: UniqueRule | None = None,
    related: _Related | None = None,
) -> Counter[str]:
    """Write one statement's tasks; return how many items were enqueued, ignored and replaced."""
    if not share:
        return Counter()
    held = related is not None and related.held
    if isinstance(share, UniformRows) and session.postgresql and on_duplicate not in REPLACE and not held:
        references = share.references
        written = _insert_uniform(session, queue, share, on_duplicate, want_ids=related is not None)
    else:
        rows = share.rows() if isinstance(share, UniformRows) else share
        if on_duplicate in REPLACE:  # one statement may not touch a row twice: the last one wins
            rows = list({row["reference_number"] or id(row): row for row in rows}.values())
        shapes = {tuple(row[OWN_COLUMNS]) for row in rows}
        if len(shapes) > 1:  # a statement sets the same columns in all of its rows
            done: Counter[str] = Counter(replaced=len(share) - len(rows))
            for shape in sorted(shapes):
                part = [row for row in rows if tuple(row[OWN_COLUMNS]) == shape]
                done.update(_insert(session, queue, part, on_duplicate, keep_due=keep_due, rule=rule, related=related))
            return done
        references = [row["reference_number"] for row in rows]
        written = _insert_rows(session, queue, rows, on_duplicate, keep_due=keep_due, rule=rule, related=related)
    if related is not None:
        related.ids += written.ids
    if on_duplicate in REPLACE and written.number > written.new:  # the replaced tasks begin anew
        tasks = session.model._base_manager.using(session.connection.alias).filter(queue=queue, total_attempt__gt=0)
        selection.delete_steps(session.model, tasks.db, tasks.filter(reference__in=references).values("pk"))
    if written.number:
        usage.after_commit(session.connection, {(queue, "put"): written.ids or written.number})
    if rule is not None:
        done = _by_rule(session, queue, rows, written, rule, related)
        done["replaced"] += len(share) - done.total()
        return done
    missing = len(references) - written.number
    if missing and on_duplicate != "ignore":
        _raise_duplicate(session, queue, share, set(written.ids), replace=on_duplicate in REPLACE)
    replaced = written.number - written.new + len(share) - len(references)
    return Counter(enqueued=written.new, ignored=missing, replaced=replaced)


def _copy(
    session: Session, queue: str, share: Batch, on_duplicate: str, savepoints: Counter[str], done: Counter[str]
) -> bool:
    """Write and count one chunk by COPY. False: nothing was written, because COPY cannot or a reference is taken."""
    alias = session.connection.alias
    if not (isinstance(share, UniformRows) and len(share) >= MIN_ROWS_TO_COPY and savepoints[alias]):
        return False
    if not session.postgresql or session.watched() or usage.watched():  # the signal names ids: COPY does not return any
        return False
    referenced = any(share.references)
    if referenced and on_duplicate == "ignore" and _some_taken(session, queue, share.references):
        return False
    risky = referenced or savepoints[alias] == MAX_SAVEPOINTS  # the first chunk shows whether COPY is allowed at all
    savepoints[alias] -= risky
    try:
        with session.atomic() if risky else nullcontext():
            ids = None
            if referenced and not share.ordered:
                ids = session.run(session.sql.reserve_ids, {"number": len(share)})[0][0].split(",")
            names, rows = share.copied(queue, ids)
            session.copy(session.sql.copy_uniform(names), rows)
    except (IntegrityError, NotSupportedError):  # the latter: COPY does not work under row-level security
        if not risky:
            raise
        savepoints[alias] = 0
        return False
    usage.after_commit(session.connection, {(queue, "put"): len(share)})
    done["enqueued"] += len(share)
    return True


def _some_taken(session: Session, queue: str, references: list[str | None]) -> bool:
    """Whether an item has the reference of another item or of a task."""
    named = [reference for reference in references if reference is not None]
    if len(set(named)) < len(named):
        return True
    params = {"queue_name": queue, "references": session.sql.dialect.text_array(named)}
    return bool(session.run(session.sql.some_taken, params)[0][0])


def _insert_uniform(session: Session, queue: str, share: UniformRows, on_duplicate: str, *, want_ids: bool) -> _Written:
    referenced = any(share.references)
    ids = want_ids or usage.watched() or (referenced and on_duplicate == "error")
    sql = session.sql.insert_uniform(referenced=referenced, ordered=referenced and share.ordered, ids=ids)
    params = {**share.columns(), "queue_name": queue, "ids": ids}
    if ids:
        return _Written.of(session, session.run(sql, params))
    number = session.count(sql, params)
    return _Written(number, number, [])


def _insert_rows(
    session: Session,
    queue: str,
    rows: list[Row],
    on_duplicate: str,
    *,
    keep_due: bool,
    rule: UniqueRule | None,
    related: _Related | None,
) -> _Written:
    timed = any(row["delay"] is not None or row["run_at"] is not None or row["ttl"] is not None for row in rows)
    grouped = {row["group_key"] for row in rows if row["group_key"] is not None}
    own, _ = own_columns(session, rows[0], as_json=True) if rows[0][OWN_COLUMNS] else ((), {})
    bound = None if rule is None else rule.bound
    held = related is not None and related.held
    sql = session.sql.insert_many(
        on_duplicate,
        timed=timed,
        grouped=bool(grouped),
        keep_due=keep_due,
        bounded=bound is not None,
        held=held,
        own=own,
    )
    grouped = set() if held else grouped  # a task that waits enters its group later
    ids = related is not None or usage.watched() or on_duplicate != "ignore" or rule is not None
    groups.lock(session, queue, grouped)
    write, time = WRITE_TIMED if timed else WRITE, session.time_text
    items = [write(row, time) for row in rows]  # payloads are JSON text already
    text = f"[{','.join(with_own_values(session, rows, items) if own else items)}]"
    params = {"queue_name": queue, "rows": text, "ids": ids, "max_wait": bound and bound.total_seconds()}
    params["number"] = groups.heads_of(session, queue) if grouped else 1
    written = _Written.of(session, session.run(sql, params))
    groups.regroup(session, queue, grouped)
    return written


def _raise_duplicate(session: Session, queue: str, share: Batch, written: set[int], *, replace: bool) -> NoReturn:
    """Name the first reference that was held by a task before, or that stands twice among the items."""
    rows = share.rows() if isinstance(share, UniformRows) else share
    named = [row["reference_number"] for row in rows if row["reference_number"] is not None]
    tasks = session.model._default_manager.using(session.connection.alias)
    holder = tasks.filter(queue=queue, reference__in=named).exclude(pk__in=written).first()
    if holder is not None:
        same = (holder.reference, holder.group_key)
        moves = replace and same not in ((row["reference_number"], row["group_key"]) for row in rows)
        raise DuplicateTask(queue, str(holder.reference), task_id=holder.pk, status=holder.status, in_other_group=moves)
    raise DuplicateTask(queue, Counter(named).most_common(1)[0][0])  # its holder went after the insert
