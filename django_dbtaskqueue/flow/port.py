"""The port: a processor settles, reads and steps through it, in the transaction of its own thread. Signals to tasks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Any, ClassVar, NamedTuple, NoReturn, ParamSpec, TypeVar

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.db import connections, transaction

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.queue import QueueSettings
from django_dbtaskqueue.core import json as json_payload
from django_dbtaskqueue.core.exceptions import SignalRefused, SignalTimeout, StepChanged, TaskQueueError, TaskSuspended
from django_dbtaskqueue.core.lease import Lease, ReceivedSignal, Steps, current_lease
from django_dbtaskqueue.core.outcomes import Decidable, Outcome, Settlement, Suspend, check_delay
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import Session, alias_for, alias_of, asynchronous, model_for, only_alias
from django_dbtaskqueue.flow import groups, usage
from django_dbtaskqueue.flow.dependencies import Parents, TaskKey, parents_of
from django_dbtaskqueue.flow.run import decide
from django_dbtaskqueue.flow.selection import delete_steps
from django_dbtaskqueue.flow.settle import resolve, settle
from django_dbtaskqueue.models import AbstractTask, Task
from django_dbtaskqueue.models.tasks import RECEIVED, SLEEP, STEP, TIMED_OUT, WAIT

P = ParamSpec("P")
T = TypeVar("T")


class SettlePort:
    """Settles on the calling thread's Django connection, in the transaction of that thread."""

    calls: ClassVar[Mapping[str, str]] = {}

    def __init__(self, alias: str, model: type[AbstractTask] = Task, *, key: str = "") -> None:
        self.alias, self.model, self.key = alias, model, key
        self.keep, self.log_level = "keep", 0
        self.extra: Mapping[str, object] = {}
        self.revivable = groups.ENDLESS_SECONDS
        self.retry: Any = None
        self.reenqueue: Any = None

    def follow(self, settings: QueueSettings, overrides: Container[str] = ()) -> None:
        """Obey these settings from the next settle on. ``overrides``: those that were set while running."""
        self.retry = settings.retry if "retry" in overrides else None
        self.reenqueue = settings.reenqueue if "reenqueue" in overrides else None
        self.keep = settings.keep
        half = settings.lease.total_seconds() / 2  # of the time for which a lease counts after its end
        self.revivable = groups.ENDLESS_SECONDS if settings.max_running is None else half
        self.log_level, self.extra = logging.getLevelNamesMapping().get(settings.log_level or "", 0), settings.extra

    @property
    def session(self) -> Session:
        """A session over the calling thread's connection."""
        return Session.on(self.alias, self.model)

    def time(self, text: str) -> datetime:
        return self.session.time(text)

    def settle(self, lease: Lease, outcome: Outcome) -> None:
        """Write one outcome, or raise ``LeaseLost``; ``ReenqueueDelayMissing`` when nothing says when it is due."""
        self.settle_all([(lease, outcome)])

    def settle_all(self, pairs: Sequence[tuple[Lease, Decidable]], *, last: bool = False) -> None:
        decided = [(lease, decide(lease, outcome)) for lease, outcome in pairs]
        with transaction.atomic(using=self.alias, savepoint=False) if len(decided) > 1 else nullcontext():
            session = self.session
            session.ends = last
            self._settle(session, decided)

    def _settle(self, session: Session, pairs: Sequence[tuple[Lease, Settlement]]) -> None:
        settled = settle(session, pairs)
        for lease, outcome in pairs:
            if lease.id not in settled:
                raise lease.gone(outcome.facts.verb)
        for lease, outcome in pairs:
            lease.outcome = outcome
        notify.on_commit(session.connection, partial(_settled, self.alias, pairs))
        if any(lease.group is not None or outcome.facts.wakes for lease, outcome in pairs):
            notify.wake_after_commit(session.connection, pairs[0][0].queue)

    def stands(self, lease: Lease) -> bool:
        return lease.id in resolve(self.session, [lease])[1]

    def parents(self, lease: Lease) -> Parents:
        return parents_of(TaskKey(self.model._meta.label_lower, lease.id), self.alias)

    def journal(self, lease: Lease) -> Steps:
        return Journal(lease, self)

    def touch(self, lease: Lease, delta: timedelta) -> None:
        session, seconds = self.session, delta.total_seconds()
        lease.until_text = str(_write(session, session.sql.touch, lease, "touch", delta=seconds, since=-self.revivable))
        lease.deadline += seconds
        usage.count_calls(session.connection, {(lease.queue, "touch"): (lease.id,)})

    def report_progress(self, lease: Lease, done: float, note: str) -> None:
        session, text = self.session, json_payload.clean_text(f"{done:.0%} {note}".strip())
        if not lease.is_atomic:
            _write(session, session.sql.progress, lease, "report_progress", note=json_payload.cut_bytes(text))


def _write(session: Session, sql: str, lease: Lease, verb: str, **values: object) -> object:
    """Write to the row of a lease that holds; return the first value of the answer, or raise ``LeaseLost``."""
    if not (rows := session.run(sql, {"id": lease.id, "total_attempt": lease.total_attempt, **values})):
        raise lease.gone(verb)
    return rows[0][0]


def _settled(alias: str, pairs: Sequence[tuple[Lease, Settlement]]) -> None:
    if groups.limit_memories:
        groups.note_ended(alias, (lease for lease, _ in pairs))
    for lease, _ in pairs:
        lease.settled = True


# -- steps that last: a processor that is called again passes the steps it has taken -----------------------------------

# A step is a row, written while the lease holds. Its position and name must be the same in each attempt. A sleep and a
# wait are steps, too: they end the call (``TaskSuspended``), and the task is settled as ``Suspend``.
#
# No wake-up is lost: ``signal`` raises ``signals`` on the task's row, and the settle of a waiting task compares it with
# the number that ``wait_for`` saw when it found no signal.

WAIT_KINDS = (WAIT, RECEIVED, TIMED_OUT)  # what a wait is, and what it becomes
STEP_DEFAULTS = {"result": None, "seconds": None, "actor": ""}  # of a step


class Stored(NamedTuple):
    """A step of an earlier attempt."""

    kind: str
    name: str
    result: str | None  # JSON
    seconds_left: float | None
    actor: str  # who sent the signal that a wait received


class Journal:
    """The steps of one task, as one attempt takes them. One query at the first step reads those of earlier attempts."""

    def __init__(self, lease: Lease, port: SettlePort) -> None:
        self._lease, self._port = lease, port
        self._position = 0
        self._stored: dict[int, Stored] | None = None
        self._suspended: Suspend | None = None
        self._inside = ""  # the name of the step whose function runs
        self.signal: ReceivedSignal | None = None

    def step(self, name: str, function: Callable[..., object], *args: object, **kwargs: object) -> object:
        if not callable(function):
            raise TypeError(
                f"task.step({name!r}, …) needs a function and its arguments, as in task.step({name!r}, charge, order). "
                f"It got {json_payload.short_repr(function)}."
            )
        if iscoroutinefunction(function):
            raise TypeError(f"task.step({name!r}, …) got an async function. Use: await task.astep({name!r}, …).")
        if (found := self._next(STEP, name)) is not None:
            return _loaded(found.result)
        self._inside = name
        try:
            with transaction.atomic(using=self._port.alias):
                text = _dumped(name, function(*args, **kwargs))
                self._store(self._position, name, STEP, result=text)
        finally:
            self._inside = ""
        return _loaded(text)

    async def astep(self, name: str, function: Callable[..., object], *args: object, **kwargs: object) -> object:
        if not iscoroutinefunction(function):
            return await sync_to_async(self.step)(name, function, *args, **kwargs)
        if (found := await sync_to_async(self._next)(STEP, name)) is not None:
            return _loaded(found.result)
        position, result = self._position, await function(*args, **kwargs)
        text = _dumped(name, result)
        await sync_to_async(self._store)(position, name, STEP, result=text)
        return _loaded(text)

    def sleep(self, delay: timedelta) -> None:
        check_delay("task.sleep(delay", delay)
        self._check_can_suspend("sleep")
        left: float | None = delay.total_seconds()
        if (found := self._next(SLEEP, SLEEP)) is not None:
            left = found.seconds_left
        else:
            self._store(self._position, SLEEP, SLEEP, seconds=left)
        if left is not None and left > 0:
            self._suspend(Suspend(timedelta(seconds=left)))

    def wait_for(self, name: str, timeout: timedelta | None, choices: Sequence[object] = ()) -> object:
        if timeout is not None:
            check_delay(f"task.wait_for({name!r}, timeout", timeout)
        left = None if timeout is None else timeout.total_seconds()
        self._check_can_suspend("wait_for")
        found = self._next(WAIT, name)
        if found is not None and found.kind == RECEIVED:
            return self._received(name, found.result, found.actor)
        if found is not None and found.kind == TIMED_OUT:
            raise SignalTimeout(self._lease.id, name)
        if found is None:
            self._store(self._position, name, WAIT, seconds=left, result=_dumped(name, [*choices] or None))
        else:
            left = found.seconds_left
        count, signal = self._next_signal(name)
        if signal is not None:
            return self._receive(name, signal)
        if left is not None and left <= 0:
            self._store(self._position, name, TIMED_OUT)
            raise SignalTimeout(self._lease.id, name)
        self._suspend(Suspend(None if left is None else timedelta(seconds=left), count))

    async def on_thread(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await sync_to_async(call)(*args, **kwargs)

    def _next(self, kind: str, name: str) -> Stored | None:
        """Go to the next position; return what is stored there. Raise ``StepChanged`` if that is another step."""
        if not json_payload.is_name(name):
            raise TypeError(f"The name of a step or a signal is text of 1 to 200 characters, not {name!r:.80}.")
        if getattr(self._lease.processor, "batch", None) is not None:
            raise TaskQueueError(
                f"Queue {self._lease.queue!r} has a batch processor, and steps belong to one task: of several tasks of "
                "one call each would go on from another step. Take batch= from the processor."
            )
        if self._inside:
            raise TaskQueueError(
                f"{_description(kind, name)} was begun inside step {self._inside!r}. Later attempts do not call the "
                "function of a stored step, so they would miss it. Take the steps one after the other."
            )
        if self._suspended is not None:  # a processor caught the exception and went on
            self._suspend(self._suspended)
        if self._stored is None:
            self._stored = self._load()
        self._position += 1
        found = self._stored.get(self._position)
        if found is not None and (found.name != name or (found.kind != kind and {found.kind, kind} - set(WAIT_KINDS))):
            before, now = _description(found.kind, found.name), _description(kind, name)
            raise StepChanged(self._lease.id, self._position, before, now)
        return found

    def _load(self) -> dict[int, Stored]:
        session = self._port.session
        rows = session.run(session.sql.steps, self._params)
        if not all(ours for *_, ours in rows):  # of another task, whose id a temporary table uses again
            delete_steps(self._port.model, self._port.alias, [self._lease.id])
            return {}
        return {position: Stored(*step) for position, *step, _ in rows}

    def _store(self, position: int, name: str, kind: str, **values: str | float | None) -> None:
        session = self._port.session
        statement = session.sql.store_step_atomic if self._lease.is_atomic else session.sql.store_step
        step = {"position": position, "name": name, "kind": kind, **STEP_DEFAULTS, **values}
        if not session.run(statement, {**self._params, **step}):
            raise self._lease.gone(_description(kind, name))

    def _next_signal(self, name: str) -> tuple[int, int | None]:
        """Return how many signals were sent so far, and the first of a name that was not received."""
        session = self._port.session
        if not (rows := session.run(session.sql.next_signal, {**self._params, "name": name})):
            raise self._lease.gone(_description(WAIT, name))
        return rows[0][0], rows[0][1]

    def _receive(self, name: str, signal: int) -> object:
        session, position = self._port.session, self._position
        with session.atomic():
            [(data, actor)] = session.run(session.sql.receive_signal, {"signal": signal})
            self._store(position, name, RECEIVED, result=data, actor=actor)
        return self._received(name, data, actor)

    def _received(self, name: str, text: str | None, actor: str) -> object:
        self.signal = ReceivedSignal(name, _loaded(text), actor)
        return self.signal.data

    def _suspend(self, outcome: Suspend) -> NoReturn:
        self._suspended = outcome
        raise TaskSuspended(outcome)

    def _check_can_suspend(self, verb: str) -> None:
        """Raise ``TaskQueueError`` where the call cannot be ended and repeated."""
        if current_lease.get() is not self._lease:
            raise TaskQueueError(
                f"task.{verb}() ends the call of a processor, and no processor is called with this task here. Call it "
                "in the processor itself, not on another thread; a lease of the pull API is given back by release() or "
                "reenqueue(delay)."
            )
        for connection in connections.all(initialized_only=True):
            for block in connection.atomic_blocks[-1:]:
                if not (getattr(block, "is_of_processor", False) or getattr(block, "_from_testcase", False)):
                    raise TaskQueueError(
                        f"task.{verb}() was called inside transaction.atomic(), which it would roll back. Call it "
                        "outside, and write in steps: task.step(name, function)."
                    )

    @property
    def _params(self) -> dict[str, object]:
        lease, location = self._lease, self._port.model._meta.label_lower
        return {"location": location, "task_id": lease.id, "token": lease.total_attempt}


def _description(kind: str, name: str) -> str:
    if kind == SLEEP:
        return "a sleep"
    return repr(name) if kind == STEP else f"a wait for the signal {name!r}"


def _dumped(name: str, result: object) -> str | None:
    return json_payload.kept(f"The result of step {name!r}", result, conf.settings().payload_limits)


def _loaded(text: str | None) -> object:
    return None if text is None else json_payload.loads(text)


# -- signals -----------------------------------------------------------------------------------------------------------

# Two statements: the first locks the task, and the second, which begins later, sees what the task waits for by then.


def signal(
    task: AbstractTask | Lease | int,
    name: str,
    data: object = None,
    *,
    queue: str | None = None,
    using: str | None = None,
    actor: str = "",
) -> bool:
    """Send a signal to a task that waits for it (``task.wait_for``), or will; return whether it is due now.

    The signal commits with the caller's transaction. Signals of one name are received in order, each once. ``data`` is
    any JSON value. ``task`` may be an id; ``queue`` then names its queue, needed if that has its own table or database.
    Raises ``SignalRefused`` if the task has ended or is not there, and ``PayloadError`` for data that is not JSON.
    """
    if not json_payload.is_name(name):
        raise TypeError(f"The name of a signal is text of 1 to 200 characters, not {name!r:.80}.")
    session, task_id = _place(task, queue, using)
    text = json_payload.kept(f"The data of signal {name!r}", data, conf.settings().payload_limits)
    params = {
        "location": session.location, "task_id": task_id, "name": name, "data": text,
        "actor": json_payload.clean_text(actor[: json_payload.MAX_NAME_CHARS]),
    }  # fmt: skip
    with session.atomic():
        rows = groups.lock_in_order(session, partial(session.run, session.sql.count_signal, params), groups.groups_of)
        if not rows or (queue and rows[0][0] != queue):
            named = {"pk": task_id, **({"queue": queue} if queue else {})}
            statuses = session.model._base_manager.using(session.connection.alias).filter(**named)
            raise SignalRefused(task_id, name, statuses.values_list("status", flat=True).first())
        [(of_queue, group)] = rows
        session.run(session.sql.store_signal, params)
        woken = bool(session.run(session.sql.wake_signalled, params))
        if woken and group is not None:
            groups.regroup(session, of_queue, {group})
        usage.count_calls(session.connection, {(of_queue, "signal"): [task_id]})
        if woken:
            notify.wake_after_commit(session.connection, of_queue)
    return woken


asignal = asynchronous(signal)


def signal_all(tasks: Iterable[AbstractTask], name: str, data: object, *, actor: str) -> int:
    """Send a signal to each task that has not ended; return how many got it."""
    sent = 0
    for task in tasks:
        with suppress(SignalRefused):
            signal(task, name, data, actor=actor)
            sent += 1
    return sent


def _place(task: AbstractTask | Lease | int, queue: str | None, using: str | None) -> tuple[Session, int]:
    using = using and alias_for("", using)
    if isinstance(task, AbstractTask):
        return Session.on(using or alias_of(task), type(task)), int(task.pk)
    if isinstance(task, Lease):
        return Session.on(using or task.port.alias, model_for(task.queue)), task.id
    if isinstance(task, bool) or not isinstance(task, int):
        raise TypeError(f"signal() needs a task or its id, not {json_payload.short_repr(task)}.")
    return Session.on(only_alias(queue or "", using), model_for(queue or "")), task
