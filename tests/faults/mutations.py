"""The package broken on purpose, one promise at a time: a run with a mutation must find a violation.

A mutation changes the text of statements, or replaces one function. It is applied in every poller and producer of a
run, never in the process that judges. The first time a changed statement runs, the ledger gets an event "mutated";
a run without one has proved nothing.
"""

import re
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

from tests.faults.ledger import Ledger

FENCE, RETRY = r"AND t\.total_attempt = u\.token\b", "SET status = u.new_status"
DUE, NOW = r"AND (t\.)?next_process_time <= statement_timestamp\(\)", "next_process_time <= statement_timestamp()"
READY = r"AND ready_time <= statement_timestamp\(\)\s+"
CHARGED = r"THEN least\(t\.attempt \+ u\.attempts_added, t\.max_attempts - 1\)"
CHECKOUT = "attempt = attempt + 1"  # only in statements that check out
FAILED_AS_COMPLETED = "SET status = CASE u.new_status WHEN 'ERROR' THEN 'COMPLETED' ELSE u.new_status END"

# Name -> (what a statement holds if it is meant, what is replaced in it, by what).
STATEMENTS: dict[str, tuple[str, str, str]] = {
    "complete without a fence": ("SET status = 'COMPLETED'", FENCE, ""),
    "fail or retry without a fence": (RETRY, FENCE, ""),
    "delete without a fence": ("DELETE", FENCE, ""),
    "settle whatever status and fence": ("SET status = ", FENCE + r"\s+AND t\.status IN \('PROCESSING'\)", ""),
    "the fence does not rise": (CHECKOUT, r"total_attempt = total_attempt \+ 1", "total_attempt = total_attempt"),
    "the fence rises by two": (CHECKOUT, r"total_attempt = total_attempt \+ 1", "total_attempt = total_attempt + 2"),
    "the fence falls at a retry": (RETRY, "SET status", "SET total_attempt = 0, status"),
    "no attempt is charged": (CHECKOUT, r"\battempt = attempt \+ 1", "attempt = attempt"),
    "two attempts are charged": (CHECKOUT, r"\battempt = attempt \+ 1", "attempt = attempt + 2"),
    "the budget is not looked at": (CHECKOUT, "AND attempt < max_attempts", ""),
    "a live lease is taken": (CHECKOUT, DUE, ""),
    "a lease is taken half a second early": (CHECKOUT, DUE, f"AND {NOW} + interval '0.5 s'"),
    "a retry starts before its time": (CHECKOUT, READY + DUE, f"AND (status = 'CREATED' OR {NOW})"),
    "a live last attempt is rescued": ("t.attempt >= t.max_attempts", DUE, ""),
    "deletions are not counted": ("dbtaskqueue_deletedtasks", "FOR NO KEY UPDATE OF t", "AND false"),
    "the history gets nothing": ('INSERT INTO "dbtaskqueue_taskhistory"', "FOR NO KEY UPDATE OF t", "AND false"),
    "a retry keeps its charge and gets one back": (RETRY, CHARGED, "THEN 0"),
    "a failure is written as COMPLETED": (RETRY, RETRY, FAILED_AS_COMPLETED),
    "three members of a group are ready": ("ranked AS", r"%\(number\)s::int", "3"),
    "a task waits for one parent only": ("dbtaskqueue_hold", r"t\.remaining - u\.number", "0"),
    "the reference of a live task is free": ("reference_number || ':'", r"AND NOT t\.status", "OR t.status"),
    "groups are not locked": ("pg_advisory_xact_lock", r"pg_advisory_xact_lock\((.*), 0\)\)", r"length(\1)"),
}


@cache
def _tell() -> None:
    """Write once that the mutation had an effect."""
    Ledger().write("mutated")


def _mutate_statements(mark: str, old: str, new: str) -> None:
    replaced = cache(partial(re.sub, old, new))

    def changed(sql: str) -> str:
        found = replaced(sql) if mark in sql else sql
        if found != sql:
            _tell()
        return found

    _change_statements(changed)


def _change_statements(changed: Callable[[str], str]) -> None:
    from django_dbtaskqueue.db.session import Session

    def through(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, sql, params: method(self, changed(sql), params)

    for method in ("run", "count", "repeat"):
        setattr(Session, method, through(getattr(Session, method)))
    together = Session.together
    Session.together = lambda self, batch: together(self, [(changed(sql), params) for sql, params in batch])  # type: ignore[method-assign]


def _used(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function; its first call tells the ledger that the mutation had an effect."""

    def call(*args: Any) -> Any:
        _tell()
        return function(*args)

    return call


def _no_transaction() -> None:
    from django_dbtaskqueue.flow import run

    run.ProcessorTransaction = _used(lambda _alias: nullcontext())  # type: ignore[assignment, misc]


def _no_capacity() -> None:
    from django_dbtaskqueue.flow import enqueue, enqueue_many

    for module in (enqueue, enqueue_many):
        module.free_capacity = _used(lambda *_: nullcontext())  # type: ignore[attr-defined]


def _own_connection() -> None:
    from django_dbtaskqueue.db.session import Session
    from django_dbtaskqueue.flow import enqueue

    sessions = threading.local()

    def elsewhere(connection: Any, model: Any) -> Session:
        if not hasattr(sessions, "one"):
            sessions.one = Session.open(connection.alias, model)
        return sessions.one  # type: ignore[no-any-return]

    enqueue.Session = _used(elsewhere)  # type: ignore[attr-defined, assignment]


def _own_clock() -> None:
    now = _used(lambda: f"to_timestamp({time.time()})")
    _change_statements(lambda sql: sql.replace("statement_timestamp()", now()) if CHECKOUT in sql else sql)


def _no_renewal() -> None:
    from django_dbtaskqueue.poller import renew

    renew.renew = _used(lambda *_: [])


def _outcome_first() -> None:
    from django_dbtaskqueue.flow import run

    perform = run.perform
    run.perform = _used(lambda lease, processor: perform(lease, processor) if processor.mode == "atomic" else run.DONE)


def _no_replacement() -> None:
    from django_dbtaskqueue.poller.process import supervisor

    supervisor.MIN_RESTART_DELAY_S = supervisor.MAX_RESTART_DELAY_S = 10_000.0
    _tell()


def _no_deadline() -> None:
    from django_dbtaskqueue.poller.executors import Executor
    from django_dbtaskqueue.poller.executors.thread import ThreadExecutor

    def late(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any) -> Any:
            for lease in args[-1].leases:
                lease.deadline = float("inf")
            return method(self, *args)

        return _used(call)

    ThreadExecutor._run = late(ThreadExecutor._run)  # type: ignore[method-assign]
    Executor._begin = late(Executor._begin)  # type: ignore[method-assign]


def _no_limits() -> None:
    from django_dbtaskqueue.flow.limiter import Limiter

    Limiter.of = _used(lambda *_: None)  # type: ignore[method-assign]


def _forgotten_steps() -> None:
    from django_dbtaskqueue.core.lease import Lease

    Lease.step = _used(lambda _self, _name, function, *args: function(*args))  # type: ignore[method-assign]


def _forgetful_moves() -> None:
    from django_dbtaskqueue.flow import shard_move

    shard_move._came = _used(lambda *_: set())


FUNCTIONS: dict[str, Callable[[], None]] = {
    "effects do not commit with the outcome": _no_transaction,
    "the capacity is not looked at": _no_capacity,
    "enqueue commits on its own": _own_connection,
    "the poller's clock counts": _own_clock,
    "leases are not renewed": _no_renewal,
    "a task is settled before it has run": _outcome_first,
    "a dead child is not replaced": _no_replacement,
    "a lease that ran out in memory starts": _no_deadline,
    "limits are not looked at": _no_limits,
    "steps are taken again": _forgotten_steps,
    "a move does not see what its target has": _forgetful_moves,
}
NAMES = (*STATEMENTS, *FUNCTIONS)


def apply(name: str) -> None:
    if name in STATEMENTS:
        _mutate_statements(*STATEMENTS[name])
    else:
        FUNCTIONS[name]()
