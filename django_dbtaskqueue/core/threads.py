"""A thread that tells how it ended, signals, and the end of the copies that a task makes of its process."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from django_dbtaskqueue.core import logger

forks = 0  # of which this process is the copy


class WatchedThread(threading.Thread):
    """A daemon thread that something depends on: ``ended`` is set at its end, and an exception is logged.

    Python says nothing about a thread that a SystemExit ends.
    """

    ended = False

    def run(self) -> None:
        try:
            super().run()
        except BaseException:
            logger.exception("Thread %s ended by an exception", self.name)
        finally:
            self.ended = True


@contextmanager
def signals_handled(handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], object]]) -> Iterator[None]:
    """Let these functions handle signals in the block; a thread that is not the main one may set none."""
    in_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number, handler in handlers.items() if in_main}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def after_fork(call: Callable[[], None]) -> Callable[[], None]:
    """Have a function called in each process that is forked from this one."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)
    return call


@after_fork
def _forked() -> None:
    global forks
    forks += 1


class NoCopies:
    """End a copy of this process that the ``with`` block forks: it must not go on with the poller's work."""

    def __enter__(self) -> None:
        self.before = forks

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if forks != self.before:
            end_copy(error)


def end_copy(error: BaseException | None) -> NoReturn:
    """End this process as a program ends that raised ``error``."""
    code = error.code if isinstance(error, SystemExit) else None if error is None else 1
    try:
        if error is not None and not isinstance(error, SystemExit):
            traceback.print_exception(error)
        sys.stdout.flush()
    finally:  # also without a stream, or with one that the task has closed
        os._exit(code & 255 if isinstance(code, int) else int(code is not None))
