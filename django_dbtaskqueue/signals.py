"""What pollers and tasks do, sent to your code after the fact is stored: listeners and Django signals.

Neither can change an outcome; what a hook or a receiver raises is logged.

Subclass ``Listener``, and name the class in ``DBTASKQUEUE["LISTENERS"]`` (dotted paths) or give an object to
``register``. Hooks before the work (``checked_out``, ``started``) are called in the order of registration. Hooks after
it (``executed``, ``crashed``, ``finished``) are called in reverse: the first listener surrounds all others.

The same facts are sent as Django signals with ``send_robust``, after the hook of the same meaning. ``task`` is the
``Lease`` and ``sender`` the queue's name; of signals with a ``poller``, ``sender`` is the poller's instance name.
"""

from typing import Protocol

from django.core.exceptions import ImproperlyConfigured
from django.dispatch import Signal
from django.utils.module_loading import import_string

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core import logger
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Outcome

__all__ = [
    "Listener", "RunningPoller", "lease_lost", "poll_failed", "poller_executed", "poller_idle", "poller_started",
    "poller_stopped", "register", "task_changed", "task_checked_out", "task_crashed", "task_executed",
    "task_finished", "task_started", "unregister",
]  # fmt: skip


#: call, task_ids, using: tasks were changed by a program or a person, and that is committed. Sent in the process that
#: changed them, once for each queue and ``call``: the name under which ``queue(…).statistics().by_call`` counts it.
task_changed = Signal()
task_checked_out = Signal()  #: task
task_started = Signal()  #: task: its processor is about to be called
task_executed = Signal()  #: task, outcome: stored, and no Fail
task_crashed = Signal()  #: task, error: a failed attempt is stored, or an outcome came too late (LeaseLost)
task_finished = Signal()  #: task, outcome, error: the attempt is over; outcome None if the lease was lost
lease_lost = Signal()  #: task, verb: an outcome came too late and changed nothing
poller_started = Signal()  #: poller
poller_executed = Signal()  #: poller, tasks: a checkout took this many
poller_idle = Signal()  #: poller: nothing to take, nothing under way
poll_failed = Signal()  #: poller, error: one poll failed; the poller goes on
poller_stopped = Signal()  #: poller


class RunningPoller(Protocol):
    """What hooks can ask of a poller: a ``poller.loop.Poller``."""

    instance: str
    state: str


class Listener:
    """Does nothing; override what you want to know. Hooks run on the poller's threads, so be quick."""

    def checked_out(self, task: Lease) -> None:
        """The task was checked out. It may still be given back before it starts.

        ``task.payload`` and ``task.context`` are decoded when a hook reads them, with the class of the processor
        here. They raise for a task that cannot be decoded.
        """

    def started(self, task: Lease) -> None:
        """Its processor is about to be called. On the thread (or event loop) that calls it."""

    def executed(self, task: Lease, outcome: Outcome) -> None:
        """The processor's outcome, any but ``Fail``, is stored."""

    def crashed(self, task: Lease, error: BaseException | str) -> None:
        """The attempt failed, and that is stored. With ``LeaseLost``: an outcome came too late to be stored."""

    def finished(self, task: Lease) -> None:
        """After ``executed`` or ``crashed``: nothing more will come of this attempt."""

    def poller_started(self, poller: RunningPoller) -> None:
        """A poller begins."""

    def poller_executed(self, poller: RunningPoller, tasks: int) -> None:
        """A checkout took this many tasks."""

    def poller_idle(self, poller: RunningPoller) -> None:
        """There is nothing to take and nothing under way; the poller waits."""

    def poll_failed(self, poller: RunningPoller, error: Exception) -> None:
        """One poll failed, usually because the database is away. The poller goes on."""

    def poller_finished(self, poller: RunningPoller) -> None:
        """The poller has ended."""


registered: list[Listener] = []  # in order; while it is empty, the hooks cost nothing
_from_settings: dict[str, Listener] = {}


def register(listener: Listener) -> None:
    """Add a listener to this process, behind those that are there. Twice is once."""
    if not isinstance(listener, Listener):
        raise TypeError(f"{listener!r} is not a Listener. Give an object of a subclass of signals.Listener.")
    if listener not in registered:
        registered.append(listener)


def unregister(listener: Listener) -> bool:
    """Take a listener away; return whether it was registered."""
    if known := listener in registered:
        registered.remove(listener)
    return known


def load_listeners() -> None:
    """Register what ``DBTASKQUEUE["LISTENERS"]`` names, once. Raise ``ImproperlyConfigured`` for no listener."""
    for path in conf.settings().listeners:
        if path not in _from_settings:
            _from_settings[path] = made(path)
            register(_from_settings[path])


def tell(hook: str, *facts: object, backwards: bool = False) -> None:
    """Call one hook of every listener; log what it raises."""
    for listener in registered[::-1] if backwards else registered[:]:
        try:
            getattr(listener, hook)(*facts)
        except Exception:
            logger.exception("Listener %r raised in %s", listener, hook)


def made(path: str) -> Listener:
    """Return a new listener of the class at a dotted path; raise ``ImproperlyConfigured`` if it is none."""
    try:
        listener = import_string(path)()
    except (ImportError, TypeError) as error:
        raise ImproperlyConfigured(f'DBTASKQUEUE["LISTENERS"]: {path!r} cannot be made: {error}') from error
    if not isinstance(listener, Listener):
        raise ImproperlyConfigured(f'DBTASKQUEUE["LISTENERS"]: {path!r} is not a django_dbtaskqueue.signals.Listener.')
    return listener


@conf.on_change
def _reset() -> None:
    for listener in _from_settings.values():
        unregister(listener)
    _from_settings.clear()
