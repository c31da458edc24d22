"""Spark's classes, read and checked once per machine instead of at each start.

The JVM of the first session writes what it loaded into an archive as it ends; later ones map it. The archive's name
holds what it is good for: this Java and this Spark. Two processes that build it at once each write their own file, and
the last to end wins. Whatever goes wrong here costs time and nothing else: no session ever fails of it.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from django_dbtaskqueue.pipeline.spark.java import real_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

DUMP = 60.0  # seconds a process waits at its end for the archive
STALE = 86400.0  # seconds after which a half of a killed process is removed


@dataclass(frozen=True)
class ClassData:
    """The archive of one Java and one Spark: ``options`` are the JVM's, to use it or to build it."""

    archive: Path | None
    half: Path | None = None
    options: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, java: Path, folder: Path) -> ClassData:
        """Return the archive in ``folder`` for the Java of that ``JAVA_HOME``; one without options if it cannot be."""
        if os.environ.get("DBTASKQUEUE_NO_CLASS_DATA"):
            return cls(None)
        try:
            return cls._find(java, folder)
        except (OSError, subprocess.SubprocessError) as error:
            logger.debug("No archive of Spark's classes: %s", error)
            return cls(None)

    @classmethod
    def _find(cls, java: Path, folder: Path) -> ClassData:
        key = _key(java)
        archive, base = folder / f"classes-{key}.jsa", folder / f"base-{key}.jsa"
        # A warning about an archive that does not fit would be the first thing a user reads.
        if archive.exists():
            return cls(archive, options=[f"-XX:SharedArchiveFile={archive}", "-Xshare:auto", "-Xlog:disable"])
        _sweep(folder)
        half = folder / f"{archive.name}.{os.getpid()}"
        options = [f"-XX:ArchiveClassesAtExit={half}", "-Xlog:disable"]
        if not (real_home(java) / "lib" / "server" / "classes.jsa").exists():
            _make_base(java, base)
            options.insert(0, f"-XX:SharedArchiveFile={base}")
        return cls(archive, half, options)

    def save_at_exit(self, session: SparkSession) -> None:
        """Have the archive built, if there is none yet, when this process ends; that takes a few seconds once."""
        gateway = session.sparkContext._gateway
        process = getattr(gateway, "proc", None)
        if self.half is not None and process is not None:
            atexit.register(self._save, session, process, os.getpid())

    def _save(self, session: SparkSession, process: subprocess.Popen[bytes], owner: int) -> None:
        if self.archive is None or self.half is None or os.getpid() != owner:
            return
        with suppress(Exception, KeyboardInterrupt):  # at the end of a process there is nobody to tell
            session.stop()
            if process.stdin is not None:
                process.stdin.close()  # Spark's gateway ends with its input
            process.wait(DUMP)
            self.half.replace(self.archive)


def _key(java: Path) -> str:
    import pyspark

    home = real_home(java)
    with suppress(OSError):
        release = (home / "release").read_text(errors="replace")
        text = f"{home}\n{release}\n{pyspark.__version__}\n{pyspark.__file__}\n{os.environ.get('SPARK_HOME')}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]
    return hashlib.sha256(f"{home}\n{pyspark.__file__}".encode()).hexdigest()[:16]


def _make_base(java: Path, base: Path) -> None:
    """Make the archive of Java's own classes, which small run-times come without."""
    if base.exists():
        return
    half = base.with_name(f"{base.name}.{os.getpid()}")
    command = [str(java / "bin" / "java"), "-Xshare:dump", f"-XX:SharedArchiveFile={half}", "-Xlog:disable"]
    subprocess.run(command, check=True, capture_output=True, timeout=DUMP)
    half.replace(base)


def _sweep(folder: Path) -> None:
    for half in folder.glob("*.jsa.*"):
        with suppress(OSError):
            if time.time() - half.stat().st_mtime > STALE:
                half.unlink()
