"""Visit every state of the protocol, and find the shortest way to a broken promise.

Two things are asked:

- *Safety*: no step and no state breaks a promise.
- *Liveness*: when the faults stop, every task ends. Until all tasks have ended, each state has a step without a fault,
  and each such step lowers ``work_left``. So pollers neither stand still nor go round in circles, in whatever order.
"""

import gc
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

from tests.model.protocol import ABSENT, CREATED, PROCESSING, Change, Job, Poller, Protocol, State

STUCK = "every task ends once the faults stop (nothing can go on)"
CIRCLE = "every task ends once the faults stop (the last step is no progress)"
Known = tuple[int, State, State | None]  # work left, a state, and the one before it
Before = dict[State, Known]  # by `canonical`


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


@contextmanager
def no_collection() -> Iterator[None]:
    """States are tuples without circles: to look for garbage among millions takes a quarter of the time."""
    gc.disable()
    yield
    gc.enable()


@no_collection()
def search(protocol: Protocol, only: str = "") -> Found:
    """Visit all states, the near ones first, up to the first broken promise; ``only``: up to the first time this is."""
    start, grouped = protocol.start(), protocol.size.grouped
    first = protocol.work_left(start), start, None
    before: Before = {canonical(start, grouped): first}
    todo, count = deque[Known]([first]), 0
    while todo:
        left, state, _ = todo.popleft()
        goes_on, broken = False, protocol.broken(state)
        for _, after, is_fault in protocol.steps(state):
            count += 1
            if isinstance(after, str):
                broken = after
                break
            key = canonical(after, grouped)
            known = before.get(key)
            if known is None:
                known = before[key] = protocol.work_left(after), after, state
                todo.append(known)
            if not is_fault:
                goes_on = True
                if known[0] >= left:
                    broken = CIRCLE
        if not goes_on and not broken and any(row.status in (ABSENT, CREATED, PROCESSING) for row in state.tasks):
            broken = STUCK
        if broken and only in ("", broken):
            return Found(len(before), count, broken, way_to(protocol, before, state, broken))
    return Found(len(before), count)


def canonical(state: State, grouped: int) -> State:
    """Return one of the states that differ in nothing but the names of pollers, and of tasks without a group."""
    rows = state.tasks
    order = (*range(grouped), *sorted(range(grouped, len(rows)), key=rows.__getitem__))
    if order != tuple(range(len(rows))):
        new = {task: number for number, task in enumerate(order)}
        state = State(
            tuple([rows[task] for task in order]),
            tuple([Poller(up, renamed(jobs, new), renamed(open, new)) for up, jobs, open in state.pollers]),
            renamed(state.others, new),
            tuple(sorted((new[task], token) for task, token in state.names)),
            state.faults,
        )
    first, second = state.pollers
    return state if first <= second else state._replace(pollers=(second, first))


def renamed(about: tuple[Job | Change, ...], new: dict[int, int]) -> tuple[Job | Change, ...]:
    return tuple(sorted([one._replace(task=new[one.task]) for one in about]))


def way_to(protocol: Protocol, before: Before, last: State, broken: str) -> tuple[str, ...]:
    path = [last]
    while (earlier := before[canonical(path[-1], protocol.size.grouped)][2]) is not None:
        path.append(earlier)
    path.reverse()
    way = [next(str(label) for label, after, _ in protocol.steps(now) if after == then) for now, then in pairwise(path)]
    for label, after, is_fault in protocol.steps(last):
        if isinstance(after, str):
            breaks = after == broken
        else:
            breaks = broken == CIRCLE and not is_fault and protocol.work_left(after) >= protocol.work_left(last)
        if breaks:
            return (*way, str(label))
    return tuple(way)
