"""System checks: what can be known to be wrong before a task is lost by it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error, register
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from django_dbtaskqueue import conf, listeners, registry
from django_dbtaskqueue.flow.process import Processor
from django_dbtaskqueue.session import aliases_of, model_for


@register("dbtaskqueue")
def check_settings(**_: Any) -> list[CheckMessage]:
    """E001: DBTASKQUEUE cannot be read. E002: a queue has an unknown database. E003: or an unknown table."""
    try:
        queues = {name: conf.default_settings(name) for name in conf.known_queues()}
    except ImproperlyConfigured as error:
        return [Error(str(error), id="dbtaskqueue.E001")]
    for name in queues:
        try:
            model_for(name)
        except ImproperlyConfigured as error:
            return [Error(f"Queue {name!r}: {error}", id="dbtaskqueue.E003")]
    return [
        Error(
            f"Queue {name!r} lives on database {queue.database!r}, which is not in DATABASES.",
            hint=f"Aliases: {', '.join(django_settings.DATABASES)}.",
            id="dbtaskqueue.E002",
        )
        for name, queue in queues.items()
        if queue.database not in django_settings.DATABASES
    ]


@register("dbtaskqueue")
def check_processors(**_: Any) -> list[CheckMessage]:
    """E004: an atomic processor writes to another database than its queue's. E005: an executor cannot be imported."""
    if not _readable():
        return []
    found = [processor for queue in registry.queues() for processor in registry.processors(queue)]
    return [problem for processor in found for problem in _problems(processor)]


def _problems(processor: Processor) -> Iterator[CheckMessage]:
    who, aliases = f"{processor.name} of queue {processor.queue!r}", aliases_of(processor.queue)
    if processor.mode == "atomic" and processor.using is not None and aliases != (processor.using,):
        yield Error(
            f"{who} is mode='atomic' and writes to database {processor.using!r}, but the queue lives on "
            f"{', '.join(map(repr, aliases))}: one transaction cannot span both.",
            hint="Use mode='separate' and make the processor idempotent, or set the queue's database to "
            f"{processor.using!r}.",
            id="dbtaskqueue.E004",
        )
    if isinstance(processor.executor, str) and (reason := _cannot_import(processor.executor)):
        yield Error(
            f"{who}: executor={processor.executor!r} cannot be imported: {reason}",
            hint="Give the dotted path of an object with submit(), or of a callable that returns one.",
            id="dbtaskqueue.E005",
        )


@register("dbtaskqueue")
def check_listeners(**_: Any) -> list[CheckMessage]:
    """E006: DBTASKQUEUE["LISTENERS"] names what is no listener."""
    if not _readable():
        return []
    try:
        for path in conf.settings().listeners:
            listeners.made(path)
    except ImproperlyConfigured as error:
        return [Error(str(error), id="dbtaskqueue.E006")]
    return []


def _readable() -> bool:
    """Whether the settings can be read; E001 says why not."""
    try:
        conf.settings()
    except ImproperlyConfigured:
        return False
    return True


def _cannot_import(path: str) -> str:
    try:
        import_string(path)
    except ImportError as error:
        return str(error)
    return ""
