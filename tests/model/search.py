"""Visit every state of the protocol, and find the shortest way to a broken promise.

Two things are asked:

- *Safety*: no step and no state breaks a promise.
- *Liveness*: when the faults stop, every task ends. Until all tasks have ended, each state has a step without a fault,
  and each such step lowers ``work_left``. So pollers neither stand still nor go round in circles, whatever the order is
  in which they act.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from tests.model.protocol import ABSENT, CREATED, PROCESSING, Protocol, State

STUCK = "every task ends once the faults stop (nothing can go on)"
CIRCLE = "every task ends once the faults stop (the last step is no progress)"
Before = dict[State, tuple[int, State | None]]  # each state that was visited: its work left, and how it was reached


class Found(NamedTuple):
    """How much was visited, the promise that is broken or nothing, and the steps to it in words."""

    states: int
    steps: int
    broken: str = ""
    way: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.broken:
            return f"{self.states:,} states, {self.steps:,} steps: every promise holds"
        lines = [f"{number:>3} {step}" for number, step in enumerate(self.way, 1)]
        return "\n".join([*lines, f"  → broken: {self.broken}"])


def search(protocol: Protocol, only: str = "") -> Found:
    """Visit all states, the near ones first, up to the first broken promise; ``only``: up to the first time this is."""
    start = protocol.start()
    before: Before = {start: (protocol.work_left(start), None)}
    todo, count = deque([start]), 0
    while todo:
        state = todo.popleft()
        left, goes_on = before[state][0], False
        broken = protocol.broken(state)
        for _, after, is_fault in protocol.steps(state):
            count += 1
            if isinstance(after, str):
                broken = after
                break
            key = canonical(after)
            if key not in before:
                before[key] = protocol.work_left(key), state
                todo.append(key)
            if not is_fault:
                goes_on = True
                if before[key][0] >= left:
                    broken = CIRCLE
        if not goes_on and not broken and any(row.status in (ABSENT, CREATED, PROCESSING) for row in state.tasks):
            broken = STUCK
        if broken and only in ("", broken):
            return Found(len(before), count, broken, way_to(protocol, before, state, broken))
    return Found(len(before), count)


def canonical(state: State) -> State:
    """Return the one of two states that differ in nothing but the names of the pollers."""
    first, second = state.pollers
    return state if first <= second else state._replace(pollers=(second, first))


def way_to(protocol: Protocol, before: Before, last: State, broken: str) -> tuple[str, ...]:
    """Return the steps that break a promise. They are made again from the start, so that each poller keeps its name."""
    path, state = [last], before[last][1]
    while state is not None:
        path.append(state)
        state = before[state][1]
    now = protocol.start()
    way: list[str] = []
    for wanted in path[-2::-1]:
        for label, after, _ in protocol.steps(now):
            if isinstance(after, State) and canonical(after) == wanted:
                way.append(str(label))
                now = after
                break
    for label, after, is_fault in protocol.steps(now):
        if isinstance(after, str):
            breaks = after == broken
        else:
            breaks = broken == CIRCLE and not is_fault and protocol.work_left(after) >= protocol.work_left(now)
        if breaks:
            return (*way, str(label))
    return tuple(way)
