"""How one poller runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from django_dbtaskqueue.poller.executors.pool import made

SHORT = {"spark": "django_dbtaskqueue.contrib.spark.SparkExecutor"}


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    threads: int = 4
    coroutines: int = 100
    once: bool = False  # one checkout per queue
    drain: bool = False  # until nothing is due, being processed, or due within five seconds
    max_tasks: int | None = None
    name: str = ""
    executor: Any = None  # where plain functions run whose processors name no executor; None: on threads
    tags: tuple[str, ...] = ()  # tasks with another tag are left to other pollers


@contextmanager
def named_executor(path: str | None, given: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the executor that a command line names, made with what is ``given``; shut down afterwards if made here.

    None where there is no path. Raises ``ImproperlyConfigured`` for what is no executor, or does not take its options.
    """
    if path is None:
        yield None
        return
    executor, owned = _made(path, given)
    try:
        yield executor
    finally:
        if owned and hasattr(executor, "shutdown"):
            executor.shutdown(wait=False)


def _made(path: str, given: Mapping[str, Any]) -> tuple[Any, bool]:
    dotted = SHORT.get(path, path)
    if not given:
        return made(dotted)
    try:
        return made(partial(import_string(dotted), **given))
    except ImportError as error:
        raise ImproperlyConfigured(f"--executor {path} cannot be imported: {error}") from error
    except TypeError as error:
        raise ImproperlyConfigured(f"--executor {path} does not take what it was given: {error}") from error
