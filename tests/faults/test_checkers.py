"""Each checker finds the violation that is planted for it, and nothing in a run in which all went well."""

from dataclasses import replace
from typing import Any

import pytest

from tests.faults.__main__ import scaled
from tests.faults.checkers import CHECKERS, Evidence, Needs, Row, check, end_ratios, restarts
from tests.faults.history import Change
from tests.faults.ledger import Event
from tests.faults.sizes import MAX_RUNNING, MUTATED, RATES, STEPS

PID = 77


def change(seq: int, old: str | None, new: str | None, fence: int = 0, **values: Any) -> Change:
    """Return a change of task 1, at second ``seq``; a checkout raises fence and attempt by one."""
    before, after = (None if old is None else fence), (None if new is None else fence + (new == "PROCESSING"))
    due = None if old is None else 0.0
    row = Change(seq, seq, 1, "plain", "ok-t-0", None, old, new, before, after, before, after, 3, due, None)
    return row._replace(**values)


def event(kind: str, clock: float, **values: Any) -> Event:
    return Event(kind, clock, PID, values)


ENQUEUED, TAKEN = change(1, None, "CREATED"), change(2, "CREATED", "PROCESSING")
DONE = change(5, "PROCESSING", "COMPLETED", 1)
INVOKED = event("invoked", 0.0, transaction="t", queue="plain", references=["ok-t-0"])
ACKNOWLEDGED = event("ok", 1.5, transaction="t")
START, END = event("start", 3.0, task=1, fence=1, reference="ok-t-0"), event("end", 4.0, task=1, fence=1)
ROW = Row(1, "plain", "ok-t-0", "COMPLETED", 1, ["ok-t-0", 1])
IN_EFFECTS = replace(ROW, queue="effects")
LIMITS = {"capacities": {"plain": 1}, "budgets": {"lethal": 3}, "expected": {"ok": "COMPLETED", "delete": None}}
GOOD = Evidence([ENQUEUED, TAKEN, DONE], [INVOKED, ACKNOWLEDGED, START, END], [ROW], bookings={"t": 0}, **LIMITS)
SECOND, GROUPED = {"task": 2, "reference": "ok-t-1"}, {"queue": "grouped", "group": "g"}
IN_GROUP = [change(1, None, "CREATED", **GROUPED), change(2, None, "CREATED", **GROUPED, **SECOND)]
IN_GROUP.append(change(3, "CREATED", "PROCESSING", **GROUPED, **SECOND))
OUTAGE = [(1, 1, "django.db.utils.OperationalError")]
DIED = [(1, 1, "django_dbtaskqueue.core.exceptions.ProcessDied")]
LATE = change(3, "PROCESSING", "PROCESSING", 1, clock=2.4)
TWICE = [START, event("start", 3.0, task=2, fence=1, reference="ok-t-1")]
AGAIN = [START, event("start", 9.0, task=1, fence=2), event("end", 9.5, task=1, fence=2)]
MIB = 2**20
SMALL = Needs(0.0, PID, "alone", 50 * MIB, 5, 20)


def after(*changes: Change, **others: Any) -> dict[str, Any]:
    """Return evidence in which so much happened after the task was enqueued."""
    return {"history": [ENQUEUED, *changes], **others}


def tick(task: int, second: int) -> Change:
    return change(task, None, "CREATED", task=task, queue="ticks", reference=f"tick@2026-11-23T06:00:0{second}Z")


NAMED = {"transaction": "t", "queue": "plain", "references": ["ok-t-0"]}
CANCELLED = event("cancelled", 6.0, reference="endless-t-0", done=True)


def lived(task: int, queue: str, reference: str, end: str | None = "COMPLETED") -> Evidence:
    """Return the evidence of a task that was enqueued, taken and ended, at the seconds from ten times its number on."""
    began, named = 10 * task, {"task": task, "queue": queue, "reference": reference}
    edges = {0: (None, "CREATED", 0), 1: ("CREATED", "PROCESSING", 0), 4: ("PROCESSING", end, 1)}
    run, transaction = {"task": task, "fence": 1}, {"transaction": reference}
    return Evidence(
        history=[change(began + number, *edge, **named) for number, edge in edges.items()],
        events=[
            event("invoked", began, **transaction, queue=queue, references=[reference], after={}),
            event("ok", began + 0.5, **transaction),
            event("start", began + 2, **run, reference=reference),
            event("end", began + 3, **run),
        ],
        rows=[Row(task, queue, reference, end or "COMPLETED", 1, [reference, 1], history=end is None)],
        bookings={reference: 0},
    )


PLANTED: dict[str, list[dict[str, Any]]] = {
    "lost": [{"history": [], "rows": [], "bookings": {}}],
    "phantom": [
        {"events": []},
        {"events": [INVOKED, event("rolled back", 1.5, transaction="t")]},
        {"events": [*GOOD.events, event("start", 3.0, task=2, fence=1, reference="undone-t-0")]},
    ],
    "torn enqueue": [{"bookings": {}}, {"history": [], "bookings": {"t": 0}}],
    "duplicate reference": [after(change(2, None, "CREATED", task=2))],
    "lease overlap": [after(TAKEN, change(3, "PROCESSING", "PROCESSING", 1, due=3.1))],
    "early start": [after(change(2, "CREATED", "PROCESSING", due=2.1))],
    "stale write accepted": [
        after(TAKEN, change(3, "PROCESSING", "COMPLETED", 1)),
        after(TAKEN, change(5, "PROCESSING", "ERROR", 1, due=6.0), events=[INVOKED, START]),
        after(TAKEN, change(5, "PROCESSING", None, 1), events=[INVOKED, START]),
        after(TAKEN, DONE._replace(new_fence=0)),
        after(TAKEN, change(3, "PROCESSING", "ERROR", 1, due=5.0), attempts=DIED),
    ],
    "fence": [
        after(TAKEN._replace(new_fence=2)),
        after(TAKEN, DONE._replace(new_fence=2)),
        after(TAKEN._replace(new_fence=0)),
        after(TAKEN, DONE._replace(new_fence=0)),
    ],
    "illegal edge": [
        after(change(2, "CREATED", "COMPLETED")),
        after(TAKEN, DONE, change(6, "COMPLETED", "CREATED", 1)),
        after(TAKEN, DONE, change(6, "ERROR", "CREATED", 1)),
    ],
    "attempts": [
        after(TAKEN._replace(new_attempt=0)),
        after(TAKEN._replace(old_attempt=3, new_attempt=4)),
        after(TAKEN, DONE._replace(new_attempt=2)),
        after(TAKEN, DONE._replace(new_attempt=0)),
    ],
    "attempt charged for an outage": [
        {"attempts": OUTAGE},
        {"attempts": OUTAGE, "history": [ENQUEUED._replace(queue="effects")], "events": [INVOKED]},
    ],
    "outcome without a run": [{"events": [INVOKED, ACKNOWLEDGED, START]}],
    "effect not exactly once": [{"rows": [IN_EFFECTS], "bookings": {"t": 0, "ok-t-0": n}} for n in (0, 2)],
    "capacity breach": [after(change(2, None, "CREATED", **SECOND))],
    "FIFO inversion": [{"history": IN_GROUP}],
    "conservation difference": [{"rows": []}, {"deleted": 1}],
    "wrong end": [
        {"rows": [Row(1, "plain", "ok-t-0", "ERROR", 3)]},
        {"rows": []},
        {"history": [ENQUEUED._replace(reference="delete-t-0")], "rows": [Row(1, "plain", "delete-t-0", "ERROR", 1)]},
    ],
    "slow return": [after(TAKEN._replace(clock=4.5), back=[1.0])],
    "slow drain": [{"drained": 21.0}],
    "slow restart": [after(TAKEN, change(8, "PROCESSING", "PROCESSING", 1), died={PID: [3.5]})],
    "slow end": [after(TAKEN, change(5, "PROCESSING", "PROCESSING", 1), died={PID: [3.5]}, events=AGAIN)],
    "growth": [
        {"needs": [SMALL._replace(clock=5.0 * n, threads=5 + n) for n in range(40)]},
        {"needs": [SMALL._replace(clock=5.0 * n, files=20 + n) for n in range(40)]},
        {"needs": [SMALL._replace(clock=5.0 * n, memory=MIB * (50 + n // 10)) for n in range(40)]},
    ],
    "answer of another task": [{"rows": [replace(ROW, result=one)]} for one in (["ok-t-1", 1], ["ok-t-0", 2])],
    "started after its lease": [
        after(TAKEN, LATE),
        after(TAKEN, LATE, LATE._replace(seq=4, **SECOND), events=TWICE, stopped={PID: [1.0]}),
    ],
    "started before its parents": [
        {"history": IN_GROUP, "events": [event("invoked", 0.0, **NAMED, after={"ok-t-1": ["ok-t-0"]})]},
        after(TAKEN._replace(reference="cut-t-0"), events=[event("invoked", 0.0, **NAMED, after={"cut-t-0": []})]),
    ],
    "step not exactly once": [
        {"rows": [Row(1, "steps", "early-t-0", "COMPLETED", 1)], "bookings": {"early-t-0 reserve": 1}},
        {"rows": lived(1, "steps", "early-t-0").rows, "bookings": {f"early-t-0 {step}": 2 for step in STEPS}},
    ],
    "tick without its task": [{"history": [tick(1, 1), tick(2, 3)]}, {"history": [tick(1, 1), tick(2, 1)]}],
    "limit breach": [after(TAKEN._replace(queue=queue, running=most + 1)) for queue, most in MAX_RUNNING.items()],
    "rate breach": [
        {"history": [TAKEN._replace(task=n, queue="limited", began=1.0, committed=1.1) for n in range(13)]},
        {"history": [TAKEN._replace(task=n, queue="wide", group="g", began=1.0, committed=1.1) for n in range(6)]},
    ],
    "two of a kind": [
        {"history": [change(task, None, "CREATED", task=task, queue="unique") for task in (1, 2)]},
        {"events": [event("asked", 1.0, task=7)]},
    ],
    "cancel without effect": [
        {"events": [event("cancelled", 6.0, reference="ok-t-0", done=True)]},
        after(change(2, "CREATED", "POISON")),
        {"events": [CANCELLED, event("alive", 60.0, reference="endless-t-0")]},
    ],
    "history differs": [
        {"history": lived(1, "evented", "ok-t-0", None).history, "rows": []},
        {"rows": [ROW, replace(ROW, history=True)]},
        {"rows": [replace(ROW, history=True)] * 2},
    ],
    "moved task not exactly once": [
        {"moved": [TAKEN, DONE, DONE], "shards": GOOD.rows},
        {"moved": [TAKEN, DONE], "shards": [*GOOD.rows] * 2},
        {"moved": [TAKEN], "shards": GOOD.rows},
    ],
    "sent task not exactly once": [{"received": ["ok-t-0"] * 2}, {"rows": lived(1, "bridged", "ok-t-0").rows}],
    "budget": [{"rows": [Row(1, "lethal", "kill-t-0", "ERROR", 2)]}],
}


def test_what_is_fine_is_no_violation() -> None:
    assert {promise: broken for promise, broken in check(GOOD).items() if broken} == {}
    rate, _burst = RATES["limited"]
    moments = [number / rate for number in range(100)]
    starts = [TAKEN._replace(queue="limited", transaction=n, began=at, committed=at) for n, at in enumerate(moments)]
    assert not [*CHECKERS["rate breach"](replace(GOOD, history=starts))]
    needs = [SMALL._replace(clock=5.0 * n, files=20 + n % 5, memory=MIB * (50 + n % 5)) for n in range(40)]
    assert check(replace(GOOD, needs=needs))["growth"] == []
    # A lease that ended, and a retry that was due.
    again = [ENQUEUED, TAKEN, change(6, "PROCESSING", "PROCESSING", 1, due=5.9), change(9, "PROCESSING", "CREATED", 2)]
    again.append(change(12, "CREATED", "PROCESSING", 2, due=11.9))
    broken = check(replace(GOOD, history=again, events=[*GOOD.events, event("end", 8.0, task=1, fence=2)]))
    assert not {name: broken[name] for name in ("lease overlap", "early start", "attempts", "fence") if broken[name]}
    # A task that ran again under its fence had ended before.
    again = [*GOOD.events, event("start", 6.0, task=1, fence=1, reference="ok-t-0"), event("end", 6.5, task=1, fence=1)]
    assert not check(replace(GOOD, events=again))["stale write accepted"]
    assert not check(replace(GOOD, history=[*GOOD.history, LATE], stopped={PID: [1.0]}))["started after its lease"]
    events = [*GOOD.events, event("start", 1.0, task=9, fence=1, reference="hold-t-9")]
    assert not check(replace(GOOD, history=[*GOOD.history, LATE], events=events))["started after its lease"]
    # A checkout that was taken back, of a task whose lease had run out before.
    back = change(3, "PROCESSING", "PROCESSING", 2, new_fence=2, new_attempt=1)
    broken = check(replace(GOOD, history=[ENQUEUED, TAKEN, back], events=[]))
    assert not broken["stale write accepted"] and not broken["attempts"]


@pytest.mark.parametrize(("promise", "changes"), [(name, one) for name, several in PLANTED.items() for one in several])
def test_a_planted_violation_is_found(promise: str, changes: dict[str, Any]) -> None:
    assert set(PLANTED) == set(CHECKERS) and [*CHECKERS[promise](replace(GOOD, **changes))]


def test_a_restart_is_counted_from_the_death_without_outages_and_a_slow_machine_has_more_time() -> None:
    again = [ENQUEUED, TAKEN, change(6, "PROCESSING", "PROCESSING", 1, due=5.9)]
    assert restarts(replace(GOOD, history=again, died={PID: [0.5, 3.5, 5.5]})) == [2.5]  # another died before it
    assert restarts(replace(GOOD, history=again, died={PID + 1: [3.5]})) == []
    again = [ENQUEUED, TAKEN, change(6, "PROCESSING", "PROCESSING", 1)]  # a long run after a restart is its own
    events = [START, event("start", 6.5, task=1, fence=2), event("end", 16.5, task=1, fence=2)]
    assert end_ratios(replace(GOOD, history=again, events=events, died={PID: [3.5]})) == [1.0]
    assert end_ratios(replace(GOOD, history=again, events=[START], died={PID: [3.5]})) == []  # it did not end
    again = [ENQUEUED, TAKEN, change(8, "PROCESSING", "PROCESSING", 1)]
    late = replace(GOOD, history=again, died={PID: [3.5]}, drained=21.0)
    assert restarts(replace(late, outages=[(0.0, 4.0), (5.0, 6.0)])) == [3.0]
    slow = check(replace(late, slowness=2.0))
    assert not slow["slow drain"] and not slow["slow restart"]


def test_a_part_of_a_size_has_some_of_each_of_its_faults_and_none_of_others() -> None:
    part = scaled(MUTATED, 0.1)
    assert (part.kills, part.restarts, part.promotions, part.seconds) == (1, 1, 0, 4)
