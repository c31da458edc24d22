"""Settle: the only way out of PROCESSING for a lease holder.

Every statement tests id, ``total_attempt`` and status. A row that does not match is not changed: another process holds
a newer lease, or an operator has revoked this one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Never

from django.db.utils import OperationalError

from django_dbtaskqueue.core import json as json_payload, logger, outcomes
from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.core.exceptions import ProcessDied, TaskQueueError
from django_dbtaskqueue.core.failure_signature import describe
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Complete, CompleteDelete, Fail, Failed, Reenqueue, Release, Settlement
from django_dbtaskqueue.core.sql import Statements
from django_dbtaskqueue.core.states import COMPLETED
from django_dbtaskqueue.db.liveness import is_about_data, sqlstate
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import dependencies, groups, usage

Statement = tuple[str, dict[str, Any]]
Decided = tuple[Lease, Settlement]
GivenBack = Release | outcomes.Park | outcomes.Suspend
Rewritten = Reenqueue | outcomes.Poison | Failed | GivenBack  # outcomes that change the row by what they carry
BLAMED_TRIES = 10  # to store an outcome, before its task is blamed for an error that may be the database's
READ_ONLY = "25"  # and its class of writes refused, as after a fail-over


def settle(session: Session, pairs: Sequence[Decided]) -> set[int]:
    """Write decided outcomes in one transaction and count them; return the ids of the tasks really settled.

    An id missing from the answer lost its lease. The caller has asked the policies (``run.decide``). The port of the
    first lease has the queue's settings. The count, and what waits for the tasks, follow the caller's commit.
    """
    expired = {lease.id for lease, outcome in pairs if isinstance(outcome, CompleteDelete) and lease.is_expired()}
    batch, members = plan(session, pairs), {lease.group for lease, _ in pairs if lease.group is not None}
    with session.atomic() if expired else nullcontext():  # once they are gone, nothing says that they did not complete
        if members:
            answers = groups.run_and_regroup(session, pairs[0][0].queue, batch, members)
        else:
            answers = session.together(batch)
        watched = {row[0] for rows in answers for row in rows if row[1]}
        changes = dependencies.end_deleted(session, expired & watched) if expired else dependencies.Changes()
    settled = {row[0] for rows in answers for row in rows}
    if groups.limit_memories and session.owned:  # otherwise the transaction of a caller is still open
        groups.note_ended(session.connection.alias, (lease for lease, _ in pairs if lease.id in settled))
    usage.settled(session.connection, pairs, settled)
    if watched:
        dependencies.announce(session, changes)
        kinds = CompleteDelete if pairs[0][0].port.keep == "keep" else (Complete, CompleteDelete)
        gone = watched & {lease.id for lease, outcome in pairs if isinstance(outcome, kinds)}
        dependencies.after_commit(session, dependencies.tell_ends, watched - gone, dict.fromkeys(gone, str(COMPLETED)))
    return settled


def plan(session: Session, pairs: Sequence[Decided]) -> list[Statement]:
    """Return the statements that settle ``pairs``; each answers with the ids it settled."""
    keep, completed = pairs[0][0].port.keep, list[tuple[Lease, Complete]]()
    deleted, written = list[Decided](), list[tuple[Lease, Rewritten]]()
    if len(pairs) > 1:
        pairs = sorted(pairs, key=lambda pair: pair[0].id)  # all that wait for row locks lock by id: no deadlocks
    for lease, outcome in pairs:
        match outcome:
            case Complete() if keep != "delete":
                completed.append((lease, outcome))
            case Complete() | CompleteDelete():
                deleted.append((lease, outcome))
            case _:
                written.append((lease, outcome))
    statements: list[Statement] = []
    if completed:
        statements += _completions(session, completed, history=keep == "history")
    if deleted:
        sql, rows = _rows(session, [_fence(lease) for lease, _ in deleted])
        both = (sql.delete_counted,) if session.postgresql else (sql.count_deleted, sql.delete_settled)
        statements += [(one, rows) for one in both]
        if expired := [_fence(lease) for lease, _ in deleted if lease.is_expired()]:
            sql, rows = _rows(session, expired)
            statements.insert(-len(both), (sql.note_expired, rows))  # first, while the rows are there
    if written:
        statements += _writes(session, written)
    return statements


def _completions(session: Session, pairs: list[tuple[Lease, Complete]], *, history: bool) -> list[Statement]:
    if history:
        sql, rows = _rows(session, [{**_fence(lease), "result_json": _result(outcome)} for lease, outcome in pairs])
        return [(sql.to_history, {**rows, "location": session.location}), (sql.delete_settled, rows)]
    columns: dict[str, list[Any]] = {"task_id": [lease.id for lease, _ in pairs]}
    columns["token"], name = [lease.total_attempt for lease, _ in pairs], "complete_plain"
    if any(outcome.result is not None for _, outcome in pairs):
        columns["result_json"], name = [_result(outcome) for _, outcome in pairs], "complete"
    if len(pairs) == 1 or not session.postgresql:
        named = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        sql, params = _rows(session, named)
        return [(getattr(sql, name), params)]
    # An array for each column costs both ends less than JSON. The escapes of JSON are those of an array: no number and
    # no JSON text has a control character.
    arrays = {column: f"{{{json_payload.array(values)[1:-1]}}}" for column, values in columns.items()}
    return [(getattr(session.sql, name), arrays)]


def _rows(session: Session, rows: list[dict[str, Any]]) -> tuple[Statements, dict[str, Any]]:
    """Return the statements for one row or several, and the rows as their parameters."""
    return (session.sql.one, rows[0]) if len(rows) == 1 else (session.sql, {"rows": json_payload.array(rows)})


def _fence(lease: Lease) -> dict[str, Any]:
    return {"task_id": lease.id, "token": lease.total_attempt}


def _result(outcome: Complete | Reenqueue) -> str | None:
    return outcome.text or json_payload.kept("The result", outcome.result)


def _writes(session: Session, pairs: list[tuple[Lease, Rewritten]]) -> list[Statement]:
    rows, failures = [], []
    for lease, outcome in pairs:
        if isinstance(outcome, Failed):
            failure = describe(outcome.said.error, lease.queue)
            failures.append({**_fence(lease), **failure})
            rows.append({**_fence(lease), **_failed_columns(outcome, failure)})
        else:
            rows.append({**_fence(lease), **_columns(lease, outcome)})
    sql, params = _rows(session, rows)
    statements = [(sql.write, params)]
    if failures:  # first, while the leases stand
        sql, params = _rows(session, failures)
        statements.insert(0, (sql.attempts, {**params, "location": session.location}))
    return statements


UNCHANGED: dict[str, Any] = {
    **dict.fromkeys(("delay", "result_text", "result_json", "park_reason", "failure_key", "signals_seen")),
    **dict.fromkeys(("attempts_added", "reenqueues_added", "deaths"), 0),
}


def _columns(lease: Lease, outcome: Reenqueue | outcomes.Poison | GivenBack) -> dict[str, Any]:
    match outcome:
        case Release() | outcomes.Park() | outcomes.Suspend():
            return {**UNCHANGED, "new_status": "CREATED", "attempts_added": -1, **outcome.columns}
        case Reenqueue(delay=delay, keep_attempts=keep_attempts):
            seconds = 0.0 if delay is None else delay.total_seconds()
            # The last attempt is given back: without one left, no checkout could ever take the task.
            kept = min(0, lease.max_attempts - 1 - lease.attempt)
            added = {"attempts_added": kept if keep_attempts else None, "reenqueues_added": 1}
            return {**UNCHANGED, "new_status": "CREATED", "delay": seconds, **added, "result_json": _result(outcome)}
        case outcomes.Poison(reason):
            return {**UNCHANGED, "new_status": "POISON", "result_text": json_payload.cut_bytes(reason) or None}
    raise TaskQueueError(f"{_unknown(outcome)!r} is not an outcome.")


def _unknown(outcome: Never) -> object:
    return outcome  # of none of the types: a type checker finds the outcome that no case above names


def _failed_columns(outcome: Failed, failure: dict[str, str]) -> dict[str, Any]:
    text = json_payload.tail_bytes(failure["traceback"] or failure["message"] or failure["error_type"])
    deaths = int(isinstance(outcome.said.error, ProcessDied))
    change = {**UNCHANGED, "result_text": text, "failure_key": failure["failure_key"], "deaths": deaths}
    if outcome.delay is None:
        return {**change, "new_status": "ERROR"}
    return {**change, "new_status": "CREATED", "delay": outcome.delay.total_seconds()}


def settle_surely(session: Session, pairs: Sequence[Decided], *, patience: float = 0.0) -> set[int]:
    """``settle``, where one bad row never fails its batch: a batch that fails is halved, and halved again.

    A single outcome that cannot be stored ends in ERROR with a short fixed text. Rows that another transaction keeps
    locked are left out after a short wait, and their leases stand. So is, for ``patience`` seconds and a number of
    tries, an outcome whose error is not about what it holds. Raises only when the database can store no outcome.
    """
    # Inside the caller's transaction a statement that fails would take all that follow with it.
    guard = session.atomic() if session.connection.in_atomic_block else nullcontext()
    try:
        with guard:
            return settle(session, pairs)
    except Exception as error:
        if (parts := _parts(session, pairs, error)) is not None:
            return set().union(*(settle_surely(session, one, patience=patience) for one in parts))
        lease = pairs[0][0]
        if not is_about_data(error) and _is_new(lease, patience):
            logger.debug("Outcome of task %s could not be stored, trying again: %s", lease.id, error)
            return set()
        logger.error("Outcome of task %s could not be stored (%s); storing a plain failure.", lease.id, error)
        return _settle_plainly(session, lease, f"Outcome could not be stored: {type(error).__name__}")


def _settle_plainly(session: Session, lease: Lease, text: str) -> set[int]:
    """Store a failure instead of an outcome. A task that takes no failure either is left to the end of its lease."""
    try:
        return settle(session, [(lease, Failed(Fail(text, retry=False)))])
    except Exception as error:
        _raise_if_common(session, [(lease, Failed(Fail(text)))], error)
        logger.error("Task %s takes no outcome, its lease runs out: %s", lease.id, error)
        return {lease.id}


def _is_new(lease: Lease, patience: float) -> bool:
    """Whether an outcome failed for less than ``patience`` seconds, or in few tries: between them may be an outage."""
    lease.unstored_since = lease.unstored_since or clock.monotonic()
    lease.unstored_tries += 1
    return patience > 0 and (lease.unstored_tries < BLAMED_TRIES or clock.monotonic() - lease.unstored_since < patience)


def _raise_if_common(session: Session, pairs: Sequence[Decided], error: Exception) -> None:
    """Raise an error that is of no outcome. To find out, settle a task that does not exist."""
    code = sqlstate(error)
    if is_about_data(error) or code == groups.LOCK_TIMEOUT_SQLSTATE:
        return
    if code.startswith(READ_ONLY) or isinstance(error, OperationalError):
        raise error
    ghost = replace(pairs[0][0], id=0, group=None)
    settle(session, [(ghost, outcome) for outcome in {type(outcome): _like(outcome) for _, outcome in pairs}.values()])


def _like(outcome: Settlement) -> Settlement:
    """Return an outcome that is written by the same statements, and holds nothing."""
    if isinstance(outcome, Failed):
        return Failed(Fail("none"))
    return type(outcome)() if isinstance(outcome, Complete | CompleteDelete) else Release()


def _parts(session: Session, pairs: Sequence[Decided], error: Exception) -> list[Sequence[Decided]] | None:
    """Return the parts of a batch to try again; None for one outcome at fault. Raise an error that is of no outcome."""
    code, middle = sqlstate(error), len(pairs) // 2
    halves = [pairs[:middle], pairs[middle:]]
    if code == groups.OUT_OF_MEMORY_SQLSTATE and len(pairs) > 1:  # fewer groups may find room for their locks
        return halves
    _raise_if_common(session, pairs, error)
    if locked := code == groups.LOCK_TIMEOUT_SQLSTATE:
        rows = json.dumps([{"task_id": lease.id, "token": lease.total_attempt} for lease, _ in pairs])
        free = {row[0] for row in session.run(session.sql.unlocked, {"rows": rows})}
        if len(free) < len(pairs):
            return [[pair for pair in pairs if pair[0].id in free]] if free else []
    if len(pairs) > 1:
        return halves
    return [] if locked else None


def resolve(session: Session, leases: Iterable[Lease]) -> tuple[set[int], set[int]]:
    """After a commit whose reply was lost: which leases are settled after all, and which still stand.

    Only the holder writes under its token, so a row that carries the token and is no longer PROCESSING was settled by
    us. A row that is gone was deleted or moved by us, or another process took it over: it is in neither set.
    """
    found = session.run(session.sql.outcome_of, {"rows": json.dumps([_fence(lease) for lease in leases])})
    held = {task_id for task_id, status in found if status == "PROCESSING"}
    return {task_id for task_id, _ in found} - held, held


def find_out(session: Session, pairs: Sequence[Decided], settled: set[int]) -> set[int]:
    """Find out what became of the leases that a settle has missed. Mark those that are lost.

    Others have a stored outcome: their processor's, or ours with a lost reply. Return the ids of the leases that still
    stand: another transaction locks their rows, so their outcomes have to wait.
    """
    missing, keep = _missing(pairs, settled), pairs[0][0].port.keep
    stored, held = resolve(session, [lease for lease, _ in missing])
    said = [(lease, lease.outcome or outcome) for lease, outcome in missing]  # first what its processor stored
    sent = [lease for lease, one in said if one.facts is Complete.facts and (lease.unanswered or lease.outcome)]
    removed = in_history(session, sent) if keep == "history" and sent else {lease.id for lease in sent}
    for lease, outcome in said:
        gone = outcome.facts.deletes_or_returns or lease.touched or (keep != "keep" and lease.id in removed)
        if lease.id in stored or (gone and lease.id not in held):
            lease.settled = lease.outcome is not None  # by the processor, which lost the reply to its commit
        elif lease.id not in held:
            lease.lost = outcome.facts.verb
    return held


def _missing(pairs: Sequence[Decided], settled: set[int]) -> list[Decided]:
    """Return the pairs that were not settled. Of two leases of one task, that is the older one, which was lost."""
    newest: dict[int, int] = {}
    for lease, _ in pairs:
        newest[lease.id] = max(lease.total_attempt, newest.get(lease.id, 0))
    return [pair for pair in pairs if pair[0].id not in settled or pair[0].total_attempt < newest[pair[0].id]]


def in_history(session: Session, leases: Iterable[Lease]) -> set[int]:
    """Return the ids of those leases whose outcome moved their task into the history."""
    rows = json.dumps([_fence(lease) for lease in leases])
    return {row[0] for row in session.run(session.sql.moved, {"rows": rows, "location": session.location})}
