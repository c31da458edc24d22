"""Ctrl-C while Spark works: one KeyboardInterrupt, and nobody else's stack traces.

PySpark puts a handler of its own in the place of Python's. That one calls the JVM on a connection which may be in the
middle of an answer; the call fails, Py4J logs each failure to the root logger, and no job is cancelled by it.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from types import FrameType

NOISY = "py4j"  # the package, and the logger of that name


@contextmanager
def held() -> Iterator[None]:
    """Let one Ctrl-C wait for the end of the block, a second one not; then put back the handler that was there before.

    A JVM that is left alone while it starts never ends, so its start is not to be cut off.
    """
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield  # this thread is not interrupted, and may set no handler
        return
    waiting: list[int] = []

    def wait(number: int, frame: FrameType | None) -> None:
        waiting.append(number)
        if len(waiting) > 1:
            before(number, frame)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if len(waiting) == 1:
            before(signal.SIGINT, None)


@contextmanager
def unlogged() -> Iterator[None]:
    """Keep Py4J from logging in the block what it raises as well, on the root logger too."""
    own, root = logging.getLogger(NOISY), logging.getLogger()
    level = own.level
    own.setLevel(logging.CRITICAL)
    root.addFilter(_is_not_py4j)
    try:
        yield
    finally:
        root.removeFilter(_is_not_py4j)
        own.setLevel(level)


def _is_not_py4j(record: logging.LogRecord) -> bool:
    return PurePath(record.pathname).parent.name != NOISY


def is_interrupt(error: BaseException) -> bool:
    """Return whether a Ctrl-C is among the reasons of an error: what breaks when a call is cut off hides it."""
    chain: list[BaseException] = [error]
    for one in chain:
        if isinstance(one, KeyboardInterrupt):
            return True
        chain += [other for other in (one.__cause__, one.__context__) if other is not None and other not in chain]
    return False
