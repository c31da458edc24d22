"""The lease: the right to settle one attempt of one task, and what a processor sees of that task."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, ParamSpec, Protocol, TypeVar, cast

from django_dbtaskqueue.core import outcomes
from django_dbtaskqueue.core.columns import TASK_COLUMNS, Column
from django_dbtaskqueue.core.exceptions import LeaseLost, TaskCancelled, TaskQueueError

if TYPE_CHECKING:
    from django_dbtaskqueue.core.retry import AnyPolicy

__all__ = ["Lease"]
P = ParamSpec("P")
T = TypeVar("T")


class NotDecoded:
    """What ``Lease.decoded`` is before the payload is decoded."""


class Declared(Protocol):
    """A processor, as far as a lease needs it."""

    def decode(self, lease: Lease) -> None: ...  # set its payload and context, or raise for what cannot be decoded
    @property
    def policy(self) -> AnyPolicy: ...  # how a failure is retried
    @property
    def reenqueue(self) -> AnyPolicy: ...  # when a task that is reenqueued without a delay is due


class ReceivedSignal(NamedTuple):
    """A signal that ``wait_for`` has returned."""

    name: str
    data: Any
    actor: str  # the user of the admin, the API or the command line; of code what it says; empty: not known


class Steps(Protocol):
    """The steps of one task in one attempt: what the methods of ``Lease`` with these names do."""

    signal: ReceivedSignal | None  # the last that a wait returned

    def step(self, name: str, function: Callable[..., object], *args: object, **kwargs: object) -> object: ...
    async def astep(self, name: str, function: Callable[..., object], *args: object, **kwargs: object) -> object: ...
    def sleep(self, delay: timedelta) -> None: ...
    def wait_for(self, name: str, timeout: timedelta | None, choices: Sequence[object]) -> object: ...
    async def on_thread(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T: ...  # for async code


class Port(Protocol):
    """Settles a lease, and knows its database. The checkout gives it to the lease.

    What writes does so on the calling thread's connection, with the fence, or raises ``LeaseLost``.
    """

    alias: str  # the database the task lives in
    key: str  # the queue, and its shard if it has any
    retry: AnyPolicy  # the policies as set while running; None: as the queue and its processor say
    reenqueue: AnyPolicy
    keep: str  # the setting of this name
    revivable: float  # seconds after its end in which a lease may still be extended
    log_level: int  # of the log lines of each task's life; 0: none
    extra: Mapping[str, object]  # the project's own settings of the queue
    calls: ClassVar[Mapping[str, str]]  # names of outcomes in the usage counters, where they are not those of pollers

    def time(self, text: str) -> datetime: ...  # as the database wrote it; returned as the site's models would show it
    def settle(self, lease: Lease, outcome: outcomes.Outcome) -> None: ...
    # In one transaction: all of them or none. ``last``: as the last act of the thread's outermost transaction.
    def settle_all(self, pairs: Sequence[tuple[Lease, outcomes.Decidable]], *, last: bool = False) -> None: ...
    def stands(self, lease: Lease) -> bool: ...  # whether it still holds, as the calling thread's transaction sees it
    def journal(self, lease: Lease) -> Steps: ...
    def touch(self, lease: Lease, delta: timedelta) -> None: ...
    def report_progress(self, lease: Lease, done: float, note: str) -> None: ...
    def parents(self, lease: Lease) -> Any: ...


@dataclass(slots=True, eq=False, weakref_slot=True)
class Lease:
    """One attempt of one task, held until ``lease_until`` and fenced by ``total_attempt``. Times are the database's.

    The three counters are those after this checkout charged its attempt. ``complete``, ``complete_delete``,
    ``reenqueue``, ``fail`` and ``poison`` write at once on the calling thread's Django connection: inside
    ``transaction.atomic()`` they commit or roll back with the caller's own writes. Each raises ``LeaseLost`` when the
    lease is gone. A processor that calls none of them is settled by its return value.
    """

    id: int
    queue: str
    reference: str | None
    attempt: int
    reenqueue_attempt: int
    total_attempt: int
    max_attempts: int
    priority: int
    payload_type: str | None
    payload_text: str | None
    context_text: str | None
    create_text: str  # times stay as the database wrote them, because few processors read one
    start_text: str
    until_text: str
    poller_instance: str
    ready_text: str
    group: str | None
    expire_text: str | None
    lease_seconds: float | None
    # In a row, before this one: their processes died, or lost the database. Positive if this checkout found a lease
    # that ran out, negative if the task had been settled or released meanwhile.
    lost_leases: int
    port: Port
    deadline: float = 0.0  # clock.monotonic() at which the lease, as last granted or renewed, runs out
    # What became of the lease in this process. No other process gets it: it begins anew with the fields above.
    decoded: Any = NotDecoded  # the payload
    decoded_context: dict[str, object] | None = None
    processor: Declared | None = None  # the processor that runs it
    outcome: outcomes.Settlement | None = None  # what the processor settled by itself; stored once ``settled``
    settled: bool = False  # an outcome of this lease is committed
    touched: bool = False  # the processor tried to settle by itself
    unstored_since: float = 0.0  # clock.monotonic() at which its outcome could not be stored; 0: it was not tried
    unstored_tries: int = 0
    begun: float = 0.0  # clock.monotonic() at which its work began; noted only if its life is logged
    unanswered: bool = False  # its outcome was sent, and no answer came
    lost: str = ""  # the verb that could not be written, because the lease was gone
    # Whether the run has to stop: it was cancelled, its timeout is over, its lease is lost, or its poller stops now.
    cancelled: bool = False
    guard: str = ""  # the middleware that runs now and may not settle
    journal: Steps | None = None  # its steps, once one was called

    @property
    def payload(self) -> Any:
        """An instance of the processor's payload class, or plain JSON. Decoded at the first use; then it may raise."""
        if self.decoded is NotDecoded:
            self._decode()
        return self.decoded

    @property
    def context(self) -> dict[str, object]:
        """What was bound at enqueue. Decoded with the payload."""
        if self.decoded_context is None:
            self._decode()
        return self.decoded_context or {}

    @property
    def extra(self) -> Mapping[str, Any]:
        """The project's own settings of the queue, which its setting ``extra`` holds. Do not change them."""
        return MappingProxyType(self.port.extra)

    def _decode(self) -> None:
        if self.processor is None:
            raise TaskQueueError(f"Task {self.id} has no processor in this process, so its payload cannot be decoded.")
        self.processor.decode(self)

    def __reduce__(self) -> tuple[type[Lease], tuple[object, ...]]:
        """Return what is sent to another process: the row, and how it is held."""
        return Lease, (*(getattr(self, column.leased) for column in LEASED), self.port, self.deadline)

    @property
    def create_time(self) -> datetime:
        """When the task was enqueued."""
        return self.port.time(self.create_text)

    @property
    def start_time(self) -> datetime:
        """When this checkout took it."""
        return self.port.time(self.start_text)

    @property
    def lease_until(self) -> datetime:
        """When the lease, as granted or last touched, runs out."""
        return self.port.time(self.until_text)

    @property
    def ready_time(self) -> datetime:
        """The task's place in the ready order."""
        return self.port.time(self.ready_text)

    @property
    def expire_time(self) -> datetime | None:
        """When its time to live is over, if it has one."""
        return None if self.expire_text is None else self.port.time(self.expire_text)

    def is_expired(self) -> bool:
        """Whether its time to live was over at the checkout."""
        return self.expire_time is not None and self.expire_time <= self.start_time

    def complete(self, result: object = None) -> None:
        """Settle as COMPLETED."""
        self._settle(outcomes.Complete(result))

    def complete_delete(self) -> None:
        """Settle by deleting the row; the deletion is counted in the same transaction."""
        self._settle(outcomes.CompleteDelete())

    def reenqueue(self, delay: timedelta | None = None, result: object = None, *, keep_attempts: bool = False) -> None:
        """Put the task back, due after ``delay``: not a failure.

        None: as the ``reenqueue`` policy of the queue or processor says, or ``ReenqueueDelayMissing``.
        """
        self._settle(outcomes.Reenqueue(delay, result, keep_attempts))

    def fail(self, error: BaseException | str = "", *, delay: timedelta | None = None, retry: bool = True) -> None:
        """Settle this attempt as failed: retried by policy while attempts are left, ERROR after that."""
        self._settle(outcomes.Fail(error, delay, retry))

    def poison(self, reason: str = "") -> None:
        """Settle as POISON."""
        self._settle(outcomes.Poison(reason))

    def touch(self, delta: timedelta) -> None:
        """Extend the lease by ``delta`` (zero is a no-op, negative a ``ValueError``). Raise ``LeaseLost`` if gone."""
        if delta < timedelta(0):
            raise ValueError(f"touch() extends a lease; {delta!r} is negative. Use reenqueue() to give the task back.")
        if delta:
            self.port.touch(self, delta)

    def check(self) -> None:
        """Raise ``TaskCancelled`` if ``cancelled``. Call it in long work: nothing else ends a function on a thread."""
        if self.cancelled:
            raise TaskCancelled(self.id)

    def report_progress(self, done: float, note: str = "") -> None:
        """Store progress (``done`` from 0 to 1) where an operator sees it; in atomic mode none could: nothing."""
        self.port.report_progress(self, done, note)

    @property
    def parents(self) -> Any:
        """The tasks that this one waited for (``enqueue(after=…)``), each with its result; read at each access."""
        return self.port.parents(self)

    def step(self, name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``function`` once, and return its stored result in each later attempt. The result must be JSON.

        The result commits together with what the function wrote to the database of the task: this happens exactly
        once. What it does elsewhere happens at least once. Raises ``StepChanged`` if an earlier attempt took another
        step here, and ``LeaseLost`` when the lease is gone: then the function's writes are rolled back.
        """
        return cast(T, self._steps.step(name, function, *args, **kwargs))

    async def astep(self, name: str, function: Callable[P, Awaitable[T] | T], *args: P.args, **kwargs: P.kwargs) -> T:
        """``step`` for an async processor. The writes of a coroutine function happen at least once.

        A plain function runs on Django's thread for the ORM, in one transaction with its result.
        """
        return cast(T, await self._steps.astep(name, function, *args, **kwargs))

    def sleep(self, delay: timedelta) -> None:
        """Give the task back for ``delay``. The attempt is not charged, and a later one goes on behind the sleep.

        Raises ``TaskSuspended``, which ends this call. Call it outside ``transaction.atomic()``.
        """
        self._steps.sleep(delay)

    async def asleep(self, delay: timedelta) -> None:
        """``sleep`` for an async processor."""
        await self._steps.on_thread(self._steps.sleep, delay)

    def wait_for(self, name: str, timeout: timedelta | None = None, choices: Sequence[object] = ()) -> Any:
        """Return the data of the next signal of that name (``signal``). Until it comes, give the task back.

        ``choices`` are JSON values: the task's page has a button for each. A signal from elsewhere may have other data.
        Raises ``SignalTimeout`` when the time is over, and ``TaskSuspended`` as ``sleep`` does.
        """
        return self._steps.wait_for(name, timeout, choices)

    async def await_for(self, name: str, timeout: timedelta | None = None, choices: Sequence[object] = ()) -> Any:
        """``wait_for`` for an async processor."""
        return await self._steps.on_thread(self._steps.wait_for, name, timeout, choices)

    @property
    def signal(self) -> ReceivedSignal | None:
        """The signal that ``wait_for`` returned last, with the ``actor`` who sent it: its data can claim anybody."""
        return self._steps.signal

    @property
    def _steps(self) -> Steps:
        if self.journal is None:
            self.journal = self.port.journal(self)
        return self.journal

    def result_of(self, settlement: outcomes.Settlement | None) -> outcomes.Settlement | outcomes.Lost | None:
        """Return what became of it once ``settlement`` (None: the code's own) was to be stored; None: unknown."""
        if self.lost and not self.settled:
            return outcomes.Lost(self.lost)
        return self.outcome if settlement is None or self.settled else settlement

    @property
    def is_atomic(self) -> bool:
        """Whether its processor's writes commit with its outcome."""
        return getattr(self.processor, "mode", "") == "atomic"

    def gone(self, verb: str) -> LeaseLost:
        """Return the error of a ``verb`` that found the lease gone. It is reported even if caught."""
        self.lost = verb
        return LeaseLost(self.id, self.total_attempt, verb)

    def _settle(self, outcome: outcomes.Outcome) -> None:
        if self.guard:
            raise TaskQueueError("It settled the task, which changes the outcome. Set its changes_outcome = True")
        self.touched = True
        self.port.settle(self, outcome)


def _leased() -> tuple[Column, ...]:
    by_field = {column.leased: column for column in TASK_COLUMNS if column.leased}
    names = [one.name for one in fields(Lease)][: len(by_field)]
    if set(names) != set(by_field):
        raise TypeError(f"Lease must begin with the leased columns {sorted(by_field)}; it begins with {names}.")
    return tuple(by_field[name] for name in names)


# The columns a checkout returns, in the order of Lease's fields: ``Lease(*row, port, deadline)``.
LEASED = _leased()
POSITION = {column.leased: number for number, column in enumerate(LEASED)}  # of each field in such a row
current_lease: ContextVar[Lease | None] = ContextVar("dbtaskqueue_lease", default=None)  # of the processor that runs
atomic_leases: ContextVar[Sequence[Lease]] = ContextVar("dbtaskqueue_atomic_leases", default=())  # of its transaction


def note_own_end(alias: str, queue: str, ids: Container[int] = (), references: Container[str | None] = ()) -> None:
    """Call it before tasks are ended: if an atomic processor ends its own, under a lease that stands, both commit."""
    for lease in atomic_leases.get():
        named = lease.id in ids or (lease.reference is not None and lease.reference in references)
        if named and (lease.port.alias, lease.queue) == (alias, queue):
            lease.touched = lease.touched or lease.port.stands(lease)
