"""Which function processes which queue, and when. A name in a row is looked up here, never imported."""

import inspect
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.cron import check_timing, default_zone
from django_dbtaskqueue.core import codecs
from django_dbtaskqueue.core.exceptions import UnknownQueue, dotted, near_match
from django_dbtaskqueue.core.json import whole_number
from django_dbtaskqueue.core.retry import AnyPolicy
from django_dbtaskqueue.core.unique import UniqueRule
from django_dbtaskqueue.db.session import alias_for
from django_dbtaskqueue.flow.middleware import Call, Middleware
from django_dbtaskqueue.flow.placement import known_queues
from django_dbtaskqueue.flow.run import Processor

F = TypeVar("F", bound=Callable[..., object])


class Periodic(NamedTuple):
    """One use of ``@periodic``. Its queue may be that of a processor that is registered later."""

    function: Callable[..., object] | None
    queue: str | None
    options: dict[str, object]  # of ``flow.schedule.Definition``; the payload as it was given


PARSED = {"retry", "timeout", "reenqueue"}  # durations and policies may be text, as in the settings
OF_CALL = {"mode", "batch", "concurrency", "executor", "using", "middleware"}  # no settings of the queue
OF_QUEUE = {"lease", "max_attempts", "unique"}  # declared by a processor, in force for its queue

# Of each queue its processors by each name that a row may have. The dict of one queue is replaced, never changed.
found: dict[str, dict[str | None, Processor]] = {}
_periodic: dict[str, Periodic] = {}
listeners: list[Callable[[str], None]] = []  # called on the registering thread with the queue of each new processor
_lock = threading.Lock()


def processor(
    queue: str,
    *,
    payload: type | None = None,
    retry: AnyPolicy = None,
    max_attempts: int | None = None,
    lease: timedelta | None = None,
    timeout: timedelta | None = None,
    mode: str = "separate",
    reenqueue: AnyPolicy = None,
    batch: int | None = None,
    concurrency: int | None = None,
    executor: object = None,
    unique: UniqueRule | str | None = None,
    using: str | None = None,
    middleware: Sequence[Middleware] = (),
) -> Callable[[F], F]:
    """Register the decorated function (sync or async), or class with a ``process(task)`` method, for a queue.

    ``payload``: a dataclass or pydantic model the JSON payload is decoded to; None hands over plain JSON. One queue may
    have a processor per payload type, which rows name by the dotted path of the class, or by its attribute
    ``payload_type`` (a text), with which the class can move. ``retry``: a policy, or a mapping of exception classes to
    policies (None: never retried). ``max_attempts`` counts the first one. ``timeout`` bounds one run, ``lease`` is
    renewed while it runs. ``reenqueue``: the policy of a reenqueue without a delay; without it that is an error.

    ``mode="separate"``: the outcome is stored after the function returned; at least once. ``mode="atomic"``, for plain
    functions: the function and its outcome are one transaction on the queue's database; an exception rolls all of it
    back, and only then is the failure stored: database effects are exactly once. ``using`` is the database the function
    writes to, when it is not the queue's: in atomic mode the system checks refuse that.

    ``batch=n``: the function gets a list of up to n tasks (those at hand; never more than the queue's ``batch_size``)
    and returns one outcome for all or a list with one for each, in order. An exception fails each of them by its own
    budget; in atomic mode they are first tried one by one. ``concurrency=k``: at most k calls at a time in one poller
    process; other tasks pass those that wait for it. ``executor``: an object with ``submit`` (``concurrent.futures``),
    a callable that makes one, or the dotted path of either: the function runs there, in up to ``slots`` calls at once.

    ``unique``: the queue's rule of uniqueness, in force in each process that knows this processor or the setting.
    ``middleware``: factories, or dotted paths, of what is called around it, inside ``DBTASKQUEUE["MIDDLEWARE"]``.

    What is None here is taken from the settings; ``DBTASKQUEUE["QUEUES"]`` overrides all of it. Raises
    ``ImproperlyConfigured`` for a second processor of the same payload type, and for what cannot work.
    """

    def register_it(function: F) -> F:
        register(
            queue, function, payload=payload, mode=mode, batch=batch, concurrency=concurrency, executor=executor,
            using=using, middleware=middleware, retry=retry, max_attempts=max_attempts, lease=lease, timeout=timeout,
            reenqueue=reenqueue, unique=unique,
        )  # fmt: skip
        return function

    return register_it


def register(
    queue: str, function: Call, *, payload: type | None = None, row_type: str | None = None, **options: Any
) -> Processor:
    """Register a processor by a call, at any time and from any thread. Tasks that waited for it are taken at once.

    ``options`` are those of ``processor``, and further settings of the queue. ``row_type`` is the payload type of rows
    of plain JSON that go to this processor, and to no other.
    """
    queue = conf.valid_name(queue)
    if payload is not None:
        codecs.build_codec(payload)
    call, where = _callable(function), f"@processor({queue!r})"
    given = {name: value for name, value in options.items() if value is not None}
    declared = {name: given.pop(name) for name in given.keys() - OF_CALL}
    parsed = {name: conf.parse(name, declared[name], where=f"{where}, {name}") for name in PARSED & declared.keys()}
    given |= {"policy": parsed.pop("retry", None), "is_async": _is(iscoroutinefunction, call), "declared": declared}
    made = Processor(queue, call, payload=payload, row_type=row_type, **given, **parsed)
    _check(made)
    with _lock:
        _refuse_second(made)
        of_queue = [*(one for one in processors(queue) if one.payload_type != made.payload_type), made]
        conf.declare_queue(queue, **_declarations(of_queue))
        _replace(queue, of_queue)
    for appeared in tuple(listeners):
        appeared(queue)
    return made


def unregister(queue: str, payload: type | None = None) -> bool:
    """Remove a processor; return whether there was one. Its running tasks finish, and the others wait."""
    unwanted = None if payload is None else codecs.type_name(payload)
    with _lock:
        before = processors(queue)
        left = [made for made in before if made.payload_type != unwanted]
        _replace(queue, left)
    return len(left) < len(before)


def find(queue: str, payload_type: str | None) -> Processor | None:
    """Return the processor of this payload type on this queue.

    A row without a type goes to the queue's processor of plain JSON, or to its only processor. A row with a type waits
    for a processor of that type, because a processor of plain JSON does not know the type.
    """
    return found.get(queue, {}).get(payload_type)


def queues() -> list[str]:
    """Return the queues that have a processor here."""
    return sorted(found)


def payload_types(queue: str) -> list[str]:
    """Return the payload types this process can handle on ``queue``, by each name that a row may have."""
    return sorted(name for name in found.get(queue, {}) if name is not None)


def types_of(queue: str, processors: Container[Processor]) -> list[str]:
    """Return the payload types that these processors take; '' is a row without a type."""
    return sorted(name or "" for name, made in found.get(queue, {}).items() if made in processors)


def processors(queue: str) -> tuple[Processor, ...]:
    """Return the processors of ``queue``."""
    return tuple(dict.fromkeys(found.get(queue, {}).values()))


def periodic(
    cron: str,
    *,
    queue: str | None = None,
    name: str | None = None,
    timezone: str | None = None,
    payload: object = None,
    priority: int | None = None,
    missed: str = "one",
    overlap: str = "allow",
) -> Callable[[F], F]:
    """Have pollers enqueue a task at each time of ``cron``, for the decorated processor or for ``queue``.

    ``cron`` is such as ``"0 7 * * mon-fri"``, in ``timezone`` (default: the site's). Stack it on ``@processor``, or
    call it with ``queue`` and ``name``. ``name`` is the schedule's (default: the dotted path of the function);
    ``payload`` and ``priority`` are the task's. ``missed`` says what becomes of ticks that no poller took for over a
    minute: ``"one"`` task for all of them, ``"skip"`` them, or ``"all"`` (the newest 100). ``overlap="skip"``: no task
    while the one before is not finished.

    What a person changes stays until the person goes back to the code. A schedule that the code no longer declares
    enqueues nothing. Raises ``ImproperlyConfigured`` for a cron text, time zone or name that is wrong or ambiguous.
    """
    given = {"timezone": timezone, "payload": payload, "priority": priority, "missed": missed, "overlap": overlap}
    try:
        check_timing(cron, timezone or default_zone())
    except ValueError as error:
        raise ImproperlyConfigured(f"@periodic({cron!r}): {error}") from None
    if queue is not None and name is not None:
        _declare(Periodic(None, queue, {"cron": cron, **given}), name)
        return lambda function: function

    def register_it(function: F) -> F:
        _declare(Periodic(function, queue, {"cron": cron, **given}), name or dotted(function))
        return function

    return register_it


def _declare(made: Periodic, name: str) -> None:
    with _lock:
        there = _periodic.get(name, made)
        # The same module imported again makes another function with the same path.
        again = there.function is not made.function and dotted(there.function) == dotted(made.function)
        if there != made and not again:
            raise ImproperlyConfigured(
                f"@periodic({made.options['cron']!r}): there is a schedule {name!r} already. Give each of them a name=."
            )
        _periodic[name] = made


def periodics() -> dict[str, Periodic]:
    """Return the schedules that the code declares, by name."""
    return dict(_periodic)


def processors_of(function: object) -> list[Processor]:
    """Return the processors that are this function or method, or an instance of this class."""
    made = [(one, getattr(one.function, "__self__", one.function)) for queue in queues() for one in processors(queue)]
    return [one for one, owner in made if function in (one.function, owner, type(owner))]


Snapshot = tuple[dict[str, dict[str | None, Processor]], dict[str, dict[str, object]], dict[str, Periodic]]


def snapshot() -> Snapshot:
    """Return a copy of all registrations, for ``restore``."""
    return dict(found), conf.declarations(), periodics()


def restore(saved: Snapshot) -> None:
    """Put registrations back to a ``snapshot``: tests that register processors use it."""
    before, declared, scheduled = saved
    with _lock:
        _periodic.clear()
        _periodic.update(scheduled)
        for queue in {*found, *before}:
            _replace(queue, before.get(queue, {}).values())
        conf.redeclare(declared)


def _replace(queue: str, of_queue: Iterable[Processor]) -> None:
    by_type = {made.payload_type: made for made in of_queue}
    classes = [made.payload for made in by_type.values() if made.payload is not None]
    codecs.expected[queue] = {codecs.type_name(cls): cls for cls in classes}
    if len(by_type) == 1 and (only := next(iter(by_type.values()))).row_type is None:
        by_type[None] = only
    if by_type:
        found[queue] = by_type
    else:
        found.pop(queue, None)


def _check(made: Processor) -> None:
    executor, fault = made.executor, ""
    if made.mode not in ("separate", "atomic"):
        fault = f"mode={made.mode!r} must be 'separate' or 'atomic'."
    elif made.mode == "atomic" and made.is_async:
        fault = (
            f"{made.name} is async and Django has no async atomic(). "
            "Make it a plain function, or use mode='separate' and settle inside your own transaction."
        )
    elif _is(inspect.isgeneratorfunction, made.function) or _is(inspect.isasyncgenfunction, made.function):
        fault = f"{made.name} is a generator function: a call runs none of its code. Take yield out of it."
    elif executor is not None and made.is_async:
        fault = (
            f"{made.name} is async, a coroutine that is not awaited by executor={executor!r}. "
            "Make it a plain function, or leave executor= out: async processors run on the poller's event loop."
        )
    elif not (executor is None or isinstance(executor, str) or callable(executor) or hasattr(executor, "submit")):
        fault = (
            f"executor={executor!r} must be an object with submit(), as of concurrent.futures, a "
            "callable that returns one, or the dotted path of either."
        )
    for name, value in (("batch", made.batch), ("concurrency", made.concurrency)):
        if value is not None and (type(value) is not int or value < 1):
            fault = f"{name}={value!r} must be None or a whole number of at least 1."
    if fault:
        raise ImproperlyConfigured(f"@processor({made.queue!r}): {fault}")


def _is(kind: Callable[[object], bool], call: object) -> bool:
    return kind(call) or kind(getattr(call, "__call__", None))  # noqa: B004 -- an instance whose __call__ is of the kind


def _declarations(processors: Iterable[Processor]) -> dict[str, object]:
    """Return what the processors of one queue declare together. Two that disagree are an error."""
    declared: dict[str, object] = {}
    for made in processors:
        for name in OF_QUEUE & made.declared.keys() & declared.keys():
            if declared[name] != made.declared[name]:
                raise ImproperlyConfigured(
                    f"@processor({made.queue!r}): {name}={made.declared[name]!r}, but another processor of the queue "
                    f"says {declared[name]!r}, and {name} is the queue's. Say it once, or in the settings."
                )
        declared |= made.declared
    return declared


def _callable(function: Callable[..., object]) -> Callable[..., object]:
    if not callable(function):
        raise ImproperlyConfigured(f"{function!r:.80} is not a function, nor a class with a process(task) method.")
    if not inspect.isclass(function):
        return function
    instance = function()
    call = getattr(instance, "process", instance)
    if not callable(call):
        raise ImproperlyConfigured(f"{function.__qualname__} needs a process(task) method to be a processor.")
    return call


def _refuse_second(made: Processor) -> None:
    there = next((one for one in processors(made.queue) if one.payload_type == made.payload_type), None)
    if there is None or there.name == made.name:  # the same module imported again
        return
    code = getattr(made.function, "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    raise ImproperlyConfigured(
        f"Queue {made.queue!r} already has the processor {there.name} for payload {made.payload_type or 'plain JSON'}; "
        f"{made.name}{place} would be a second one. Give it another payload type or another queue."
    )


# -- which queues a poller serves --------------------------------------------------------------------------------------

# What a poller is told of its queues and their weights: ``--queue mail:8,default:4 --exclude slow``.


def weights_of(texts: Iterable[str], excluded: Iterable[str] = ()) -> dict[str, int]:
    """Return queue names and weights (1 if not given) from texts; all queues with a processor if there are none.

    Raises ``UnknownQueue`` with the nearest name, and ``ImproperlyConfigured`` for a queue without a processor, for a
    bad weight, and when no queue is left.
    """
    if not (requested := dict(_pair(text) for text in _names(texts)) or dict.fromkeys(queues(), 1)):
        raise ImproperlyConfigured(
            "There is nothing to poll: no processor is registered. Write one with @processor(...) in the tasks.py of "
            "an installed app."
        )
    excluded_names = set(_names(excluded))
    for queue in [*requested, *excluded_names]:
        _check_has_processor(queue)
    if not (selected := {queue: weight for queue, weight in requested.items() if queue not in excluded_names}):
        raise ImproperlyConfigured(
            f"There is nothing to poll: --exclude leaves none of {', '.join(sorted(requested))}."
        )
    return selected


def check_databases(queues: Iterable[str], using: str | None) -> None:
    """Raise ``ImproperlyConfigured`` for a database that ``DATABASES`` does not have."""
    for queue in queues:
        alias = alias_for(queue, using)
        if alias not in connections:
            raise ImproperlyConfigured(
                f"There is no database {alias!r} in DATABASES for queue {queue!r}.{near_match(alias, connections)}"
            )


def _names(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from filter(None, map(str.strip, text.split(",")))


def _pair(text: str) -> tuple[str, int]:
    name, colon, weight = text.rpartition(":")
    if not colon or text in queues():  # a name may hold colons of its own
        return text, 1
    if (number := whole_number(weight) or 0) < 1:
        raise ImproperlyConfigured(f"{text!r}: the weight of a queue is a whole number of at least 1, as in {name}:2.")
    return name, number


def _check_has_processor(queue: str) -> None:
    known = queues()
    if queue in known:
        return
    try:
        there = known_queues()  # with those made at runtime
    except DatabaseError:
        there = {*conf.settings_queues()}
    if queue in there:
        raise ImproperlyConfigured(
            f"Queue {queue!r} has no processor in this project, so nothing could process its tasks. Write one with "
            f"@processor({queue!r}) in the tasks.py of an installed app. "
            f"Queues with a processor: {', '.join(known) or 'none'}."
        )
    raise UnknownQueue(queue, {*known, *there})
