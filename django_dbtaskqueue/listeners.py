"""Listeners: code of yours that is told what pollers and tasks do, and can never change it.

Subclass ``Listener``, and name the class in ``DBTASKQUEUE["LISTENERS"]`` (dotted paths) or hand an object to
``register``. Hooks before the work (``picked``, ``started``) are called in the order of registration, hooks after it
(``executed``, ``crashed``, ``finished``) in reverse, so that the first one registered surrounds all others. What a hook
raises is logged. The same facts are sent as Django signals, after the listeners (``signals``).
"""

from __future__ import annotations

import logging
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Outcome

logger = logging.getLogger("django_dbtaskqueue")


class Listener:
    """Does nothing; override what you want to know. Hooks run on the poller's threads, so be quick."""

    def picked(self, task: Lease) -> None:
        """The task was checked out. It may still be given back before it starts."""

    def started(self, task: Lease) -> None:
        """Its processor is about to be called. On the thread (or event loop) that calls it."""

    def executed(self, task: Lease, outcome: Outcome) -> None:
        """The processor's outcome, any but ``Fail``, is stored."""

    def crashed(self, task: Lease, error: BaseException | str) -> None:
        """The attempt failed, and that is stored: what the processor raised, or gave as the reason.

        Also called, with ``LeaseLost``, when an outcome came too late to be stored.
        """

    def finished(self, task: Lease) -> None:
        """After ``executed`` or ``crashed``: nothing more will come of this attempt."""

    def poller_started(self, poller: Any) -> None:
        """A ``poller.loop.Poller`` begins."""

    def poller_executed(self, poller: Any, tasks: int) -> None:
        """A checkout took so many tasks."""

    def poller_idle(self, poller: Any) -> None:
        """There is nothing to take and nothing under way; the poller waits."""

    def poller_crashed(self, poller: Any, error: Exception) -> None:
        """A turn failed, usually because the database is away. The poller goes on by itself."""

    def poller_finished(self, poller: Any) -> None:
        """The poller has ended."""


registered: list[Listener] = []  # in order; falsy as long as nobody listens, and then listening costs nothing
_from_settings: dict[str, Listener] = {}


def register(listener: Listener) -> None:
    """Add a listener to this process, behind those that are there. Twice is once."""
    if not isinstance(listener, Listener):
        raise TypeError(f"{listener!r} is no Listener. Subclass django_dbtaskqueue.listeners.Listener, give an object.")
    if listener not in registered:
        registered.append(listener)


def unregister(listener: Listener) -> None:
    """Take a listener away; one that is not there is no error."""
    if listener in registered:
        registered.remove(listener)


def load() -> None:
    """Register what ``DBTASKQUEUE["LISTENERS"]`` names, once. Raise ``ImproperlyConfigured`` for no listener."""
    for path in conf.settings().listeners:
        if path not in _from_settings:
            _from_settings[path] = made(path)
            register(_from_settings[path])


def tell(hook: str, *facts: Any, backwards: bool = False) -> None:
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
        raise ImproperlyConfigured(f'DBTASKQUEUE["LISTENERS"]: {path!r} is no django_dbtaskqueue.listeners.Listener.')
    return listener


def _forget(*, setting: str, **_: Any) -> None:
    if setting == "DBTASKQUEUE":
        for listener in _from_settings.values():
            unregister(listener)
        _from_settings.clear()


setting_changed.connect(_forget)
