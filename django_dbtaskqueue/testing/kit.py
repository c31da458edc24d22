"""``drain`` and ``perform``: a poller's own fetch and settle, on the calling thread and its connections. Assertions."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any, NamedTuple, TypedDict, Unpack

from asgiref.sync import async_to_sync
from django.apps import apps
from django.db import connections, router, transaction
from django.db.models import Count, DateTimeField, Model
from django.test import TestCase

from django_dbtaskqueue import registry, signals
from django_dbtaskqueue.conf.overrides import overridden_settings
from django_dbtaskqueue.core import codecs, json as json_payload
from django_dbtaskqueue.core.columns import ENQUEUED, InsertOptions, TaskOptions
from django_dbtaskqueue.core.durations import parse_length
from django_dbtaskqueue.core.exceptions import LeaseLost, PayloadError, TaskQueueError, near_match
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Complete, Lost, Outcome, Raised, Settlement, said
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db.session import Row, Session, aliases_of, model_for
from django_dbtaskqueue.flow import dependencies, placement
from django_dbtaskqueue.flow.checkout import ScanCursor
from django_dbtaskqueue.flow.enqueue import enqueue_task
from django_dbtaskqueue.flow.rescue import rescue
from django_dbtaskqueue.flow.run import Processor, no_handler, run_all, run_all_async
from django_dbtaskqueue.models import AbstractTask, Attempt, Step, Task, TaskHistory
from django_dbtaskqueue.poller.executors import Done, Executor, Finish, Job
from django_dbtaskqueue.poller.fetch import Fetcher
from django_dbtaskqueue.poller.free_slots import Capacity, Executors
from django_dbtaskqueue.poller.heartbeat import Heartbeat, ScheduleJob
from django_dbtaskqueue.poller.held_leases import Settler
from django_dbtaskqueue.poller.lifetime import threads_started
from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.poller.queue_state import ConnectionSet, Options, QueueState
from django_dbtaskqueue.pull.leases import seconds_until_due

MAX_RUNS = 10_000
POLLER_TIMEOUT = timedelta(seconds=30)
CLOCK_TICK = timedelta(milliseconds=1)  # every database can tell two times apart that differ by this much
KINDS_OF_END = {"deleted": "completed", "suspend": "suspended"}  # where ``Facts`` has another word


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What ``drain`` did, counted in attempts; ``outcomes`` are in the order they were stored."""

    completed: int = 0
    reenqueued: int = 0
    retried: int = 0  # failed, to be tried again
    failed: int = 0  # failed, now in ERROR
    poisoned: int = 0
    expired: int = 0  # past their time to live, not run
    parked: int = 0  # no processor here takes their payload type
    suspended: int = 0  # began to sleep, or to wait for a signal
    lost: int = 0  # the lease was gone before an outcome could be stored
    outcomes: tuple[Outcome, ...] = ()

    @property
    def errors(self) -> list[BaseException | str]:
        """What the failed attempts failed with."""
        return [error for outcome in self.outcomes if (error := outcome.facts.error) is not None]

    def __str__(self) -> str:
        counts = {name: getattr(self, name) for name in DRAIN_COUNTS}
        return ", ".join(f"{number} {kind}" for kind, number in counts.items() if number) or "nothing was due"


DRAIN_COUNTS = [field.name for field in fields(DrainReport)][:-1]


def drain(
    queue: str | None = None,
    *,
    using: str | None = None,
    tags: Sequence[str] = (),
    limit: int = MAX_RUNS,
    with_scheduled: bool = False,
    raising: bool = False,
) -> DrainReport:
    """Run what is due in ``queue`` (None: in every known queue), and what that enqueues, until nothing is due.

    One call of a processor at a time, of each queue in the ready order, each settled before the next is taken. Tasks
    with a tag need one of ``tags``. Schedules that are due get their tasks. What limits hold back is not due yet.
    ``with_scheduled=True`` lets time pass (``advance``) up to the next task that is due later. A failed attempt is
    stored, and ``raising=True`` then raises its exception. Raises ``AssertionError`` that names the queue when there is
    more to do after ``limit`` attempts.
    """
    known = placement.known_places(using) if queue is None else [(queue, alias) for alias in aliases_of(queue, using)]
    poller = InlinePoller(known, tags)
    counts, outcomes, before = Counter[str](), list[Outcome](), -1
    while True:
        wait = poller.seconds_until_due() if with_scheduled else None  # asked first: a task may become due meanwhile
        counts["failed"] += poller.begin_pass()
        while poller.fetch():
            if poller.taken and counts.total() >= limit:
                [lease] = poller.taken[:1]
                raise AssertionError(
                    f"drain() ran {limit:,} attempts and queue {lease.queue!r} still has a task due (id {lease.id}, "
                    f"reference {lease.reference!r}, attempt {lease.attempt}, reenqueued {lease.reenqueue_attempt} "
                    "times). Does its processor enqueue or reenqueue itself without end? If it should, pass a higher "
                    "limit=."
                )
            for ran in poller.work():
                counts[ran.kind] += 1
                outcomes += [] if ran.outcome is None else [ran.outcome]
                if raising:
                    ran.raise_again()
        if counts.total() == before:
            if wait is None:
                return DrainReport(**{name: counts[name] for name in DRAIN_COUNTS}, outcomes=tuple(outcomes))
            for alias in poller.aliases:
                advance(timedelta(seconds=wait) + CLOCK_TICK, using=alias)
        before = counts.total()


def perform(
    queue: Any,
    payload: Any = None,
    *,
    reference: str | None = None,
    attempt: int = 1,
    reenqueue_attempt: int = 0,
    context: Mapping[str, Any] | None = None,
    raising: bool = True,
    using: str | None = None,
) -> Outcome:
    """Run one payload through its whole round trip (enqueue, checkout, decode, processor, settle); return the outcome.

    ``queue`` is a queue's name or its processor. The task is a real row, gone afterwards; what the processor wrote
    stays. ``attempt`` is the number the processor sees. Limits do not count. What the processor raises is raised here,
    unless ``raising=False``. Raises ``LeaseLost`` when the lease was gone before an outcome could be stored.
    """
    processor = _processor(queue)
    name = queue if processor is None else processor.queue
    poller = InlinePoller([(name, aliases_of(name, using)[0])])
    [state] = poller.queues
    session = poller.connections.session(state)
    with transaction.atomic(using=state.port.alias):  # no poller may take it before us
        named = {} if processor is None or processor.payload is None else {"payload_type": processor.payload_type}
        given = TaskOptions(reference, payload, context=context)
        task = enqueue_task(name, given, InsertOptions(using=state.port.alias), named)  # a rule could find another one
        if not 1 <= attempt <= task.max_attempts:
            raise ValueError(f"perform(attempt={attempt}): queue {name!r} has {task.max_attempts} attempts.")
        before = {"attempt": attempt - 1, "total_attempt": attempt - 1, "reenqueue_attempt": reenqueue_attempt}
        session.model._base_manager.using(state.port.alias).filter(pk=task.pk).update(**before)
        state.strategy, state.limiter = _Exactly(json.dumps([{"task_id": task.pk, "token": attempt - 1}])), None
        poller.fetch()
        if not poller.taken:
            raise TaskQueueError(f"Queue {name!r} is paused, so perform() cannot take a task. Resume it first.")
    [lease] = poller.taken
    try:
        [ran] = poller.work()
    finally:
        _delete_traces(session, task)
    if raising:
        ran.raise_again()
    if ran.kind == "parked":
        raise TaskQueueError(f"perform(): {no_handler(lease.queue, lease.payload_type)}.")
    if ran.kind == "suspended":
        raise TaskQueueError(
            "perform(): the processor called task.sleep() or task.wait_for(), and perform() runs one attempt. Enqueue "
            "the task, and use drain(with_scheduled=True), advance() and signal()."
        )
    if ran.outcome is None:
        raise LeaseLost(lease.id, lease.total_attempt, "settle")
    return ran.outcome


def _delete_traces(session: Session, task: AbstractTask) -> None:
    alias = session.connection.alias
    session.model._base_manager.using(alias).filter(pk=task.pk)._raw_delete(alias)
    for model in (TaskHistory, Attempt, Step):
        model._base_manager.using(alias).filter(location=session.location, task_id=task.pk)._raw_delete(alias)


def _processor(target: Any) -> Processor | None:
    """Return the one processor that ``target`` (a function or class) is registered as; None for a queue's name."""
    if isinstance(target, str):
        return None
    found = registry.processors_of(target)
    if len(found) != 1:
        queues = ", ".join(repr(processor.queue) for processor in found) or "no queue"
        name = getattr(target, "__qualname__", repr(target))
        raise TaskQueueError(f"perform(): {name} is the processor of {queues}; give perform() the queue's name.")
    return found[0]


@dataclass(frozen=True, slots=True)
class _Exactly:
    """A checkout strategy that takes one task, wherever it stands in the ready order."""

    rows: str

    def take(self, session: Session, cursor: ScanCursor, params: dict[str, Any]) -> list[Row]:
        return session.run(session.sql.checkout_optimistic, {**params, "queue_name": cursor.queue, "rows": self.rows})


class Ran(NamedTuple):
    """What became of a lease, and the outcome that is stored."""

    kind: str
    outcome: Outcome | None = None

    def raise_again(self) -> None:
        if isinstance(self.outcome, Raised) and isinstance(self.outcome.error, BaseException):
            raise self.outcome.error


class InlineExecutor(Executor):
    """Runs all jobs on the calling thread, in ``work``."""

    slots = 1

    def work(self) -> None:
        while self.todo:
            if (run := self._begin(None, self.todo.popleft())) is not None:
                with _sheltered():
                    settlements = _call(run.job)
                self._end(None, settlements)

    def nudge(self) -> None:
        """Do nothing: jobs start in ``work``."""


class InlineExecutors(Executors):
    """One executor for all processors, whatever they ask for."""

    def __init__(self, options: Options, finish: Finish) -> None:
        super().__init__(options, finish)
        self.inline = InlineExecutor(finish, self.limiter)
        self.all = [self.inline]

    def of(self, processor: Processor | None) -> Executor:
        return self.inline

    def submit_isolated(self, jobs: list[Job]) -> None:
        for job in jobs:
            self.submit_special(job.processor, [job.lease])


class InlinePoller:
    """Polls queues one call of a processor at a time: ``fetch``, then ``work``."""

    def __init__(self, places: Sequence[tuple[str, str]], tags: Sequence[str] = ()) -> None:
        signals.load_listeners()
        self.queues = [QueueState.of(name, alias) for name, alias in places]
        for queue in self.queues:
            calls = [processor.batch or 1 for processor in registry.processors(queue.name)]
            queue.apply(replace(queue.settings, batch_size=max(calls, default=1)))
        by_key = {queue.port.key: queue for queue in self.queues}
        self.aliases = sorted({queue.port.alias for queue in self.queues})
        self._schedules = [ScheduleJob(alias, lambda _: None) for alias in self.aliases]
        options = Options(threads=1, tags=tuple(tags))
        self._settler = Settler(by_key, lambda: None)
        executors = InlineExecutors(options, self._settler.finish)
        self._executor = executors.inline
        ports = [queue.port for queue in self.queues]
        self.connections = ConnectionSet({(one.alias, one.model): Session.on(one.alias, one.model) for one in ports})
        self._fetcher = Fetcher("testing", by_key, Capacity(executors, self._settler, options), lambda *_: None)

    def begin_pass(self) -> int:
        """Do what pollers do beside their polls; return how many tasks of dead processes went to ERROR."""
        for job in self._schedules:
            job.run()
        for session in self.connections.sessions.values():
            dependencies.sweep(session)  # in a test's transaction nothing is committed, so no end of a task was told
            dependencies.sweep_missing(session, 0)
        dead = 0
        for queue in self.queues:
            queue.next_poll = 0.0  # the next fetches look at all queues
            dead += len(rescue(self.connections.session(queue), queue.name, queue.port))
        return dead

    @property
    def taken(self) -> list[Lease]:
        return list(self._settler.held)

    def seconds_until_due(self) -> float | None:
        """Return the time until the next task is due, or a rate allows one; None if there is none."""
        waits = [seconds_until_due(queue.name, queue.port.alias) for queue in self.queues]
        pauses = [queue.limiter.pause or None for queue in self.queues if queue.limiter]
        return min([max(0.0, wait) for wait in (*waits, *pauses) if wait is not None], default=None)

    def fetch(self) -> bool:
        """Take what is next in the ready order of a queue; False if nothing is due in any queue."""
        for queue in self.queues:
            queue.cursor.rewind()
            queue.cursors.clear()
        if (chosen := self._fetcher.choose()) is not None:
            self._fetcher.poll(self.connections, *chosen)
        return chosen is not None

    def work(self) -> list[Ran]:
        """Run what was taken, and settle it; return what became of each lease, in order."""
        self._executor.work()
        ran: list[Ran] = []
        while self._settler.done:
            ended = list(self._settler.done)
            self._settler.settle(self.connections)
            ran += [_ran(done) for done in ended if done not in self._settler.done]
        return ran


def _ran(done: Done) -> Ran:
    lease = done.lease
    result = lease.result_of(done.settlement) or Complete()
    facts = result.facts
    if isinstance(result, Lost) or not facts.counts_as:
        return Ran("parked" if facts.parks else KINDS_OF_END.get(facts.verb, facts.verb))
    outcome: Any = said(result)
    kind = "expired" if lease.is_expired() else facts.counts_as
    return Ran(KINDS_OF_END.get(kind, kind), outcome)


def _call(job: Job) -> list[Settlement | None]:
    if job.processor.is_async:
        return async_to_sync(run_all_async)(job.leases, job.processor)
    settlements = run_all(job.leases, job.processor)
    for settlement in settlements:
        error = None if settlement is None else settlement.facts.error
        if isinstance(error, BaseException) and not isinstance(error, Exception | SystemExit):
            raise error  # Ctrl-C, or the test framework ending the test
    return settlements


@contextmanager
def _sheltered() -> Iterator[None]:
    """Keep what a processor breaks (a poller's connection would survive it) from breaking the test's transaction."""
    with ExitStack() as savepoints:
        around = [connection for connection in connections.all(initialized_only=True) if connection.in_atomic_block]
        for connection in around:
            savepoint = transaction.atomic(using=connection.alias)
            savepoint._from_testcase = True  # type: ignore[attr-defined] # atomic(durable=True) must work inside
            savepoints.enter_context(savepoint)
        yield
        for connection in around:
            raw: Any = connection.connection
            if connection.needs_rollback or connection.vendor != "postgresql":
                continue
            if raw.info.transaction_status.name == "INERROR":
                transaction.set_rollback(True, using=connection.alias)


def advance(delta: timedelta | str, *, using: str | None = None) -> None:
    """Let ``delta`` pass for the queue: every time in its tables moves that far into the past.

    Scheduled tasks come nearer, leases and pauses run out; the project's own rows stay. ``delta`` is a ``timedelta`` or
    text such as "15m"; negative is a ``ValueError``. ``using`` None: where any known queue lives.
    """
    passed = parse_length(delta)
    everywhere = sorted({router.db_for_write(Task)}.union(*map(aliases_of, placement.known_queues())))
    for alias in everywhere if using is None else [using]:
        for model in apps.get_models():
            if model._meta.app_label == Task._meta.app_label or issubclass(model, AbstractTask):
                _shift(model, passed, alias)


def _shift(model: type[Model], passed: timedelta, alias: str) -> None:
    session, quote = Session.on(alias), connections[alias].ops.quote_name
    columns = [quote(one.column) for one in model._meta.local_fields if isinstance(one, DateTimeField) and one.column]
    if columns:
        moved = [f"{column} = {session.sql.dialect.later('%(delta)s', start=column)}" for column in columns]
        update = f"UPDATE {quote(model._meta.db_table)} SET {', '.join(moved)}"  # noqa: S608 -- names of models
        session.run(update, {"delta": -passed.total_seconds()})


# -- assertions on what waits in a queue -------------------------------------------------------------------------------

MAX_LISTED_TASKS = 10
ASSERTABLE = (*(column.option for column in ENQUEUED if column.option), "delay")
DURATION_ARGUMENTS = tuple(column.argument for column in ENQUEUED if column.type == "float8")
DELAY_TOLERANCE = timedelta(seconds=1)  # two delays that differ by less are the same


class Wanted(TypedDict, total=False):
    """What a task can be asserted to be."""

    reference: Any
    payload: Any  # plain JSON, or a dataclass or pydantic model
    priority: Any
    group: Any
    tag: Any
    context: Any
    lease: Any  # timedelta
    delay: Any  # timedelta from when the task became ready until it is due, compared to the second


def assert_enqueued(
    queue: str, *, count: int | None = None, using: str | None = None, **wanted: Unpack[Wanted]
) -> AbstractTask:
    """Return the oldest task that waits in ``queue`` (status CREATED) and is as ``wanted``. Nothing is run.

    ``count``: exactly this many are. Values are compared by ``==``, so ``unittest.mock.ANY`` and the like may stand in.
    Raises ``AssertionError`` that lists what is in the queue instead, nearest first.
    """
    expected, tasks = _expected(wanted), _tasks(queue, using)
    found = [task for task in tasks if not _differences(task, expected)]
    if not found or count not in (None, len(found)):
        number = "a task" if count is None else f"exactly {count}"
        raise AssertionError(_message(queue, number, len(found), tasks, expected, using))
    return found[0]


def refute_enqueued(queue: str, *, using: str | None = None, **wanted: Unpack[Wanted]) -> None:
    """Raise ``AssertionError`` if any task that is as ``wanted`` waits in ``queue`` (status CREATED)."""
    expected = _expected(wanted)
    if found := [task for task in _tasks(queue, using) if not _differences(task, expected)]:
        raise AssertionError(_message(queue, "no task", len(found), found, expected, using))


def _tasks(queue: str, using: str | None) -> list[AbstractTask]:
    found: list[AbstractTask] = []
    for alias in aliases_of(queue, using):
        overridden_settings(queue, alias)  # UnknownQueue: a misspelt name must not pass
        found += model_for(queue)._base_manager.using(alias).filter(queue=queue)
    return sorted(found, key=lambda task: (task.create_time, task.pk))


def _expected(wanted: Mapping[str, Any]) -> dict[str, Any]:
    for name in wanted:
        if name not in ASSERTABLE:
            raise TypeError(f"A task has no {name!r} to assert.{near_match(name, ASSERTABLE)}")
    expected = {"status": "CREATED", **wanted}
    if "payload" in wanted:
        with suppress(PayloadError):  # what holds ``ANY`` or the like is compared as it is
            payload_type, plain = codecs.encode(wanted["payload"])
            expected["payload"] = json_payload.loads(json_payload.dumps(plain))  # as the row shows it
            expected |= {} if payload_type is None else {"payload_type": payload_type}
    return expected


def _shown(task: AbstractTask) -> dict[str, Any]:
    shown = {column.argument: getattr(task, column.name) for column in ENQUEUED}
    shown |= {name: timedelta(seconds=shown[name]) for name in DURATION_ARGUMENTS if shown[name] is not None}
    delay = None if task.ready_time is None else task.ready_time - task.last_update_time
    return {"status": str(task.status), **shown, "delay": delay}


def _differences(task: AbstractTask, expected: dict[str, Any]) -> list[str]:
    def equal(value: Any, wanted: Any) -> bool:
        durations = isinstance(value, timedelta) and isinstance(wanted, timedelta)
        return bool(abs(value - wanted) < DELAY_TOLERANCE if durations else wanted == value)

    shown = _shown(task)
    return [name for name, value in expected.items() if not equal(shown[name], value)]


def _message(
    queue: str, number: str, found: int, tasks: list[AbstractTask], expected: dict[str, Any], using: str | None
) -> str:
    given = [f"{name}={_short(value)}" for name, value in expected.items() if name not in ("status", "payload_type")]
    wanted = f" with {', '.join(given)}" if given else ""
    headline = f"Expected {number} waiting in queue {queue!r}{wanted}, found {found or 'none'}."
    if not tasks:
        others = model_for(queue)._base_manager.using(aliases_of(queue, using)[0]).filter(status=Status.CREATED)
        counts = others.values_list("queue").annotate(number=Count("id")).order_by("queue")
        named = ", ".join(f"{name!r} ({count})" for name, count in counts) or "no other queue"
        return f"{headline}\nQueue {queue!r} is empty. Tasks wait in {named}."
    nearest = sorted(tasks, key=lambda task: len(_differences(task, expected)))[:MAX_LISTED_TASKS]
    more = [f"  and {len(tasks) - MAX_LISTED_TASKS} more"] if len(tasks) > MAX_LISTED_TASKS else []
    return "\n".join([headline, f"Queue {queue!r} has:", *(_line(task, expected) for task in nearest), *more])


def _line(task: AbstractTask, expected: dict[str, Any]) -> str:
    shown = _shown(task)
    asked = [name for name in shown if name in expected and name != "status"]
    facts = [f"{name}={_short(shown[name])}" for name in dict.fromkeys(("reference", "payload", *asked))]
    unlike = _differences(task, expected)
    return f"  {shown['status']} {' '.join(facts)}" + (f"  <- differs in {', '.join(unlike)}" if unlike else "")


def _short(value: Any) -> str:
    return str(value) if isinstance(value, timedelta) else json_payload.short_repr(value, 200)


@contextmanager
def run_poller(
    *queues: str,
    threads: int = 2,
    coroutines: int = 20,
    tags: Sequence[str] = (),
    timeout: timedelta = POLLER_TIMEOUT,
    using: str | None = None,
) -> Iterator[Poller]:
    """Run a real poller of ``queues``, on threads and connections of its own, for as long as the block lasts.

    It does all that ``runtaskpoller`` does. At the end of the block it goes on as with ``--drain``: ``AssertionError``
    when that takes longer than ``timeout``. After an exception in the block it stops at once. It sees only what is
    committed: for ``TransactionTestCase`` and ``django_db(transaction=True)``. Elsewhere it raises ``TaskQueueError``.
    """
    for alias in {alias for queue in queues for alias in aliases_of(queue, using)}:
        if connections[alias].in_atomic_block:
            raise TaskQueueError(
                f"run_poller() has connections of its own, which see nothing of the open transaction on {alias!r}. "
                "Use TransactionTestCase or @pytest.mark.django_db(transaction=True), or drain() instead."
            )
    poller = Poller(dict.fromkeys(queues, 1), Options(threads, coroutines, tags=tuple(tags)), using=using)
    with threads_started(poller, Heartbeat(poller)):
        try:
            yield poller
            poller.options = poller.fetcher.capacity.options = replace(poller.options, drain=True)
            poller.wake("")
            if not poller.wait(timeout.total_seconds()):
                leases = [run.job.lease for run in poller.running()]
                running = ", ".join(f"{lease.queue}/{lease.reference or lease.id}" for lease in leases) or "nothing"
                named = f"The poller of {', '.join(poller.queues)}"
                raise AssertionError(f"{named} was not done after {timeout}: {poller.state}, running {running}.")
        finally:
            poller.stop()
            if not poller.wait(timeout.total_seconds()):
                poller.cancel()


class TaskQueueKit:
    """The functions of this package as methods; mix it into any ``unittest`` class."""

    advance = staticmethod(advance)
    assert_enqueued = staticmethod(assert_enqueued)
    drain = staticmethod(drain)
    perform = staticmethod(perform)
    refute_enqueued = staticmethod(refute_enqueued)
    run_poller = staticmethod(run_poller)


class TaskQueueTestCase(TaskQueueKit, TestCase):
    """Django's ``TestCase`` with the kit. Processors that a test registers are gone after it."""

    def setUp(self) -> None:
        super().setUp()
        self.addCleanup(registry.restore, registry.snapshot())
