"""What a job shows on a terminal: progress, errors as one paragraph, and Ctrl-C without stack traces."""

from __future__ import annotations

import logging
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import PurePath
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from django_dbtaskqueue.core.exceptions import TaskQueueError
from django_dbtaskqueue.core.masking import masked_text

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Progress = Callable[[str, int, int], None]

PROGRESS_STEP_PERCENT = 10  # between two lines of one stage
SKETCH_MEMORY = "org.apache.datasketches.memory.internal.ResourceImpl"
PY4J = "py4j"  # the package, and its logger
JAVA_TRACE_PATTERN = re.compile(r"\s*(JVM stacktrace:|Driver stacktrace:|\n\tat |SQLSTATE: \w+).*", re.DOTALL)
PYTHON_ERROR_PATTERN = re.compile(r"^(\w+(?:\.\w+)*(?:Error|Exception|Rejected|Unknown\w*): .+)$", re.MULTILINE)

# An error of a task is raised, so what the driver and an executor log of it is left out.
LOG4J_PROPERTIES = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
logger.scheduler.name = org.apache.spark.scheduler.TaskSchedulerImpl
logger.scheduler.level = warn
logger.tasks.name = org.apache.spark.scheduler.TaskSetManager
logger.tasks.level = off
logger.streams.name = org.apache.spark.sql.execution.streaming.runtime.MicroBatchExecution
logger.streams.level = off
logger.executor.name = org.apache.spark.executor.Executor
logger.executor.level = off
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n
"""


def silent(stage: str, done: int, total: int) -> None:
    """Show no progress."""


@contextmanager
def shown_on(stream: TextIO, *, quiet: bool = False) -> Iterator[Progress]:
    """Show progress on ``stream`` in the block: a bar on a terminal if rich is installed, else lines."""
    if quiet:
        yield silent
    elif stream.isatty() and find_spec("rich"):
        with _bar(stream) as progress:
            yield progress
    else:
        yield _lines(stream)


def _lines(stream: TextIO) -> Progress:
    """Return what writes a line when a stage begins, and one for each tenth of it."""
    last = ("", -1)

    def write(stage: str, done: int, total: int) -> None:
        nonlocal last
        step = done * 100 // total // PROGRESS_STEP_PERCENT if total else 0
        if (stage, step) != last:
            last = (stage, step)
            amount = f": {done:,} of {total:,}" if total else f": {done:,}" if done else ""
            stream.write(f"{stage}{amount}\n")
            stream.flush()

    return write


@contextmanager
def _bar(stream: TextIO) -> Iterator[Progress]:
    from rich import progress as rich
    from rich.console import Console

    columns = (rich.SpinnerColumn(), rich.TextColumn("{task.description}"), rich.BarColumn(),
               rich.MofNCompleteColumn(), rich.TimeElapsedColumn())  # fmt: skip
    with rich.Progress(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task("", total=None)

        def draw(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total or None)

        yield draw


# -- errors ------------------------------------------------------------------------------------------------------------


def one_paragraph(error: BaseException) -> str:
    """Return the error as one paragraph with a remedy, masked and without stack traces."""
    if isinstance(error, TaskQueueError):
        return masked_text(str(error))
    kind = type(error)
    text = f"{kind.__name__}: {str(error) or 'no message'}"
    if kind.__module__.startswith(("pyspark", "py4j")):
        python = PYTHON_ERROR_PATTERN.findall(str(error))
        text = f"Spark says: {python[-1] if python else error}"
    elif kind.__module__.startswith(("psycopg", "sqlite3", "adbc")):
        text = f"The database says: {error}. Check that it runs, that its address is right, and that it is migrated"
    text = JAVA_TRACE_PATTERN.sub("", text).strip()
    return re.sub(r"\s*\n\s*", " ", masked_text(text)).rstrip(".") + "."


# -- Ctrl-C and SIGTERM ------------------------------------------------------------------------------------------------


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt in the block, unless the process handles it: then Spark is ended, too."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def interrupts_delayed() -> Iterator[None]:
    """Delay a first Ctrl-C or SIGTERM to the end of the block; a second one acts at once. Restores the handlers.

    A JVM whose start is cut off never ends. PySpark also sets a handler of its own: it calls the JVM on a connection
    that may be in the middle of an answer, the call fails, Py4J logs the failure, and no job is cancelled.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in handlers.items() if callable(handler)}
    if not before or threading.current_thread() is not threading.main_thread():
        yield  # this thread is not interrupted, and may set no handler
        return
    waiting: list[int] = []

    def wait(number: int, frame: FrameType | None) -> None:
        waiting.append(number)
        if len(waiting) > 1:
            before[signal.Signals(number)](number, frame)

    for number in before:
        signal.signal(number, wait)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if len(waiting) == 1:
            before[signal.Signals(waiting[0])](waiting[0], None)


def silence_spark() -> None:
    """Let Spark log nothing more: of tasks that were cut off it would print stack traces."""
    context = getattr(getattr(sys.modules.get("pyspark"), "SparkContext", None), "_active_spark_context", None)
    if context is not None:
        with suppress(Exception, KeyboardInterrupt), py4j_silenced():  # the process ends: nobody could handle it
            log4j = context._jvm.org.apache.logging.log4j
            log4j.core.config.Configurator.setAllLevels("", log4j.Level.OFF)


@contextmanager
def py4j_silenced() -> Iterator[None]:
    """Suppress in the block what Py4J logs, on the root logger too: it raises the same errors."""
    own, root = logging.getLogger(PY4J), logging.getLogger()
    level = own.level
    own.setLevel(logging.CRITICAL)
    root.addFilter(_is_not_py4j)
    try:
        yield
    finally:
        root.removeFilter(_is_not_py4j)
        own.setLevel(level)


def _is_not_py4j(record: logging.LogRecord) -> bool:
    return PurePath(record.pathname).parent.name != PY4J


def without_query_contexts() -> None:
    """Keep PySpark from logging, as JSON, the place in a query of each error that it raises."""
    from pyspark.logger import PySparkLogger

    for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)


def is_interrupt(error: BaseException) -> bool:
    """Return whether a Ctrl-C is among the causes of an error. A call that is cut off raises an error of its own."""
    chain: list[BaseException] = [error]
    for one in chain:
        if isinstance(one, KeyboardInterrupt):
            return True
        chain += [other for other in (one.__cause__, one.__context__) if other is not None and other not in chain]
    return False


def without_sketch_warning(session: SparkSession) -> None:
    """Keep Spark's JVM from printing, at its first sketch, that "Java versions > Java 11" have limits.

    They are those of memory outside the heap, which Spark's sketches do not use. The class prints it when it is loaded.
    """
    with suppress(Exception):  # a name inside Spark, which another version may not have
        java = session._jvm.java  # type: ignore[union-attr]
        console, silence = java.lang.System.err, java.io.PrintStream(java.io.OutputStream.nullOutputStream())
        java.lang.System.setErr(silence)
        try:
            java.lang.Class.forName(SKETCH_MEMORY)
        finally:
            java.lang.System.setErr(console)
