"""Settle: the one door out of PROCESSING for a lease holder.

Every statement tests id, ``total_attempt`` and status. A row that does not match is not changed: whoever holds a newer
lease, or the operator who revoked this one, has the last word.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db.utils import DatabaseError, OperationalError

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core import json as json_payload
from django_dbtaskqueue.core import retry
from django_dbtaskqueue.core.exceptions import TaskQueueError
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Complete, CompleteDelete, Fail, Outcome, Poison, Reenqueue
from django_dbtaskqueue.core.sql.statements import Statements
from django_dbtaskqueue.db.session import Row, Session
from django_dbtaskqueue.flow import groups
from django_dbtaskqueue.flow.failure_signature import describe

logger = logging.getLogger(__name__)

Statement = tuple[str, dict[str, Any]]
LOCKED = "55P03"  # what PostgreSQL calls a wait that was longer than lock_timeout
READ_ONLY = "25"  # and its class of writes refused, as after a fail-over


@dataclass(frozen=True, slots=True)
class Release:
    """Give back a task that did not start: the attempt is not charged, the place in line is kept."""


@dataclass(frozen=True, slots=True)
class Park:
    """Give back, uncharged, a task that cannot be taken here, and say why; out of the line until that changes."""

    reason: str


Settlement = Outcome | Release | Park
Pair = tuple[Lease, Settlement]


def settle(session: Session, pairs: Sequence[Pair], *, keep: str = "keep", group_retry: str = "hold") -> set[int]:
    """Write outcomes in one transaction; return the ids of the tasks really settled.

    All of one queue. An id that is missing from the answer lost its lease. Failures are decided here against the
    budget on the row: retried by the lease's policy, or ERROR. Raises the database's errors; nothing is written then.
    """
    batch = plan(session, pairs, keep=keep)
    if any(lease.group is not None for lease, _ in pairs):
        answers = _settle_grouped(session, pairs, batch, hold_retries=group_retry == "hold")
    else:
        answers = session.together(batch)
    return {row[0] for rows in answers for row in rows}


def _settle_grouped(
    session: Session, pairs: Sequence[Pair], batch: list[Statement], *, hold_retries: bool
) -> list[list[Row]]:
    """Settle under the groups' locks, and put the next head of each group in line in the same transaction."""
    queue = pairs[0][0].queue
    members = {lease.group: outcome for lease, outcome in pairs if lease.group is not None}
    back = {group for group, outcome in members.items() if isinstance(outcome, Reenqueue)}
    with session.atomic():
        groups.lock(session, queue, members)
        answers = [session.run(sql, params) for sql, params in batch]
        groups.regroup(session, queue, back, hold_retries=False)
        groups.regroup(session, queue, members.keys() - back, hold_retries=hold_retries)
    return answers


def plan(session: Session, pairs: Iterable[Pair], *, keep: str = "keep") -> list[Statement]:
    """Return the statements that settle ``pairs``; each answers with the ids it settled."""
    completed: list[Pair] = []
    deleted: list[Pair] = []
    written: list[Pair] = []
    for pair in sorted(pairs, key=_id_of):  # rows are locked in this order, as by all who wait for locks: no deadlocks
        kind = type(pair[1])
        if kind is Complete:
            (deleted if keep == "delete" else completed).append(pair)
        else:
            (deleted if kind is CompleteDelete else written).append(pair)
    statements: list[Statement] = []
    if completed:
        statements += _completions(session, completed, history=keep == "history")
    if deleted:
        sql, rows = _rows(session, list(map(_fence, deleted)))
        statements += [(sql.count_deleted, rows), (sql.remove, rows)]
    if written:
        statements += _writes(session, written)
    return statements


def _id_of(pair: Pair) -> int:
    return pair[0].id


def _completions(session: Session, pairs: list[Pair], *, history: bool) -> list[Statement]:
    if history:
        sql, rows = _rows(session, list(map(_completion, pairs)))
        return [(sql.to_history, {**rows, "location": session.location}), (sql.remove, rows)]
    if any(outcome.result is not None for _, outcome in pairs):  # type: ignore[union-attr]
        sql, rows = _rows(session, list(map(_completion, pairs)))
        return [(sql.complete, rows)]
    if not session.postgresql or len(pairs) == 1:
        sql, rows = _rows(session, list(map(_fence, pairs)))
        return [(sql.complete_plain, rows)]
    # Array literals: a list of ints costs psycopg twice what the join does.
    ids = ",".join([str(lease.id) for lease, _ in pairs])
    tokens = ",".join([str(lease.total_attempt) for lease, _ in pairs])
    return [(session.sql.complete_plain, {"ids": f"{{{ids}}}", "tokens": f"{{{tokens}}}"})]


def _rows(session: Session, rows: list[dict[str, Any]]) -> tuple[Statements, dict[str, Any]]:
    """Return the statements for so many rows, and the rows as their parameters."""
    if len(rows) > 1:
        return session.sql, {"rows": json.dumps(rows)}
    row = rows[0]
    return session.sql.one, row if row.get("r") is None else {**row, "r": json.dumps(row["r"])}


def _fence(pair: Pair) -> dict[str, Any]:
    return {"i": pair[0].id, "k": pair[0].total_attempt}


def _completion(pair: Pair) -> dict[str, Any]:
    return {**_fence(pair), **_result(pair[1].result)}  # type: ignore[union-attr]


def _result(result: Any) -> dict[str, Any]:
    """Return a result as JSON for ``result`` and as text, cut at 4000 bytes, for ``process_result``."""
    if result is None:
        return {"p": None, "r": None}
    stored = json.loads(json_payload.safe_json(result))
    text = stored if isinstance(stored, str) else json.dumps(stored, ensure_ascii=False)
    return {"p": json_payload.cut_bytes(text), "r": stored}


def _writes(session: Session, pairs: list[Pair]) -> list[Statement]:
    rows, failures = [], []
    for lease, outcome in pairs:
        row, failure = write(lease, outcome)
        rows.append({**_fence((lease, outcome)), **row})
        if failure is not None:
            failures.append({**_fence((lease, outcome)), **failure})
    sql, params = _rows(session, rows)
    statements = [(sql.write, params)]
    if failures:  # first, while the leases stand
        sql, params = _rows(session, failures)
        statements.insert(0, (sql.attempts, {**params, "location": session.location}))
    return statements


def write(lease: Lease, outcome: Settlement) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the columns one outcome changes, and the failed attempt to record, if it is one."""
    unchanged = {"d": None, "a": 0, "e": 0, "p": None, "r": None, "w": None, "f": None}
    match outcome:
        case Release():
            return {**unchanged, "s": "CREATED", "a": -1}, None
        case Park(reason):
            return {**unchanged, "s": "CREATED", "a": -1, "w": reason[:200]}, None
        case Reenqueue(delay, result, keep_attempts):
            seconds = (delay or timedelta(0)).total_seconds()
            # The last attempt is given back: in line without an attempt left, nobody could ever take the task.
            kept = min(0, lease.max_attempts - 1 - lease.attempt)
            change = {"d": seconds, "a": kept if keep_attempts else None, "e": 1, **_result(result)}
            return {**unchanged, "s": "CREATED", **change}, None
        case Poison(reason):
            why = reason if isinstance(reason, str) else json_payload.short_repr(reason)
            return {**unchanged, "s": "POISON", "p": json_payload.cut_bytes(why) or None}, None
        case Fail():
            delay = retry.decide(
                outcome,
                attempt=lease.attempt,
                max_attempts=lease.max_attempts,
                policy=lease.policy or conf.retry_policy(lease.queue, lease.processor and lease.processor.policy),
            )
            lease.retried = delay is not None
            failure = describe(outcome.error, lease.queue)
            text = json_payload.tail_bytes(failure["b"] or failure["m"] or failure["t"])
            if delay is None:
                return {**unchanged, "s": "ERROR", "p": text, "f": failure["f"]}, failure
            return {**unchanged, "s": "CREATED", "d": delay.total_seconds(), "p": text, "f": failure["f"]}, failure
    raise TaskQueueError(f"{outcome!r} is not an outcome.")


def settle_surely(
    session: Session, pairs: Sequence[Pair], *, keep: str = "keep", group_retry: str = "hold"
) -> set[int]:
    """``settle``, where one bad row never fails its batch: alone on error, then halved, then in the least of words.

    Rows that somebody keeps locked (a processor that hangs in its own transaction) are left out after a short wait:
    their leases stand. Raises only when the database cannot be reached, or takes no writes.
    """
    # Inside the caller's transaction a statement that fails would take all that follow with it.
    guard = session.atomic() if session.connection.in_atomic_block else nullcontext()
    try:
        with guard:
            return settle(session, pairs, keep=keep, group_retry=group_retry)
    except DatabaseError as error:
        parts = _parts(session, pairs, error)
        if parts is not None:
            return set().union(*[settle_surely(session, part, keep=keep, group_retry=group_retry) for part in parts])
        lease = pairs[0][0]
        logger.error("Outcome of task %s could not be stored (%s); storing a plain failure.", lease.id, error)
        plain = f"Outcome could not be stored: {type(error).__name__}"
        return settle(session, [(lease, Fail(plain, retry=False))], keep=keep)


def _parts(session: Session, pairs: Sequence[Pair], error: DatabaseError) -> list[Sequence[Pair]] | None:
    """Return which parts of a batch that failed to try again, if any; None for a single outcome that is at fault.

    Raises the error when no outcome is at fault.
    """
    code = str(getattr(error.__cause__, "sqlstate", ""))
    locked = code == LOCKED
    if code.startswith(READ_ONLY) or (isinstance(error, OperationalError) and not locked):
        raise error
    if locked:
        rows = json.dumps([{"i": lease.id, "k": lease.total_attempt} for lease, _ in pairs])
        free = {row[0] for row in session.run(session.sql.unlocked, {"rows": rows})}
        if len(free) < len(pairs):
            return [[pair for pair in pairs if pair[0].id in free]] if free else []
    if len(pairs) > 1:
        middle = len(pairs) // 2
        return [pairs[:middle], pairs[middle:]]
    return [] if locked else None


def resolve(session: Session, leases: Iterable[Lease]) -> tuple[set[int], set[int]]:
    """After a commit whose reply was lost: which leases are settled after all, and which still stand.

    Only the holder writes under its token, so a row that carries the token and is no longer PROCESSING was settled by
    us. A row that is gone was deleted or moved by us, unless somebody took it over; then it is in neither set.
    """
    rows = json.dumps([{"i": lease.id, "k": lease.total_attempt} for lease in leases])
    found = session.run(session.sql.outcome_of, {"rows": rows})
    standing = {task_id for task_id, status in found if status == "PROCESSING"}
    return {task_id for task_id, _ in found} - standing, standing


def release(session: Session, leases: Iterable[Lease]) -> set[int]:
    """Give back tasks that did not start, uncharged; return the ids of those that were still held."""
    pairs: list[Pair] = [(lease, Release()) for lease in leases]
    return settle(session, pairs) if pairs else set()
