"""Files of the lake on a local or mounted file system: written through to the disk, or refused with a remedy."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from django_dbtaskqueue.core.exceptions import LakeError

DAMAGED = "Restore it from a backup; `check` says what else is damaged"


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the folder of a path or a ``file:`` URL. Raises LakeError for another kind of URL."""
    text = os.fspath(path)
    parts = urlsplit(text)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return Path(unquote(parts.path)).absolute()
    if "://" in text:
        reason = "is not on a local or mounted file system, where alone a file can be renamed in one step"
        raise LakeError(text, reason, "Mount the store and give its folder, or copy closed files there afterwards")
    return Path(text).absolute()


@contextmanager
def writing(root: Path) -> Iterator[None]:
    """Turn what the file system refuses meanwhile into a LakeError with a remedy."""
    try:
        yield
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}"
        remedy = "Check path, owner and free space, or give another folder with --lake"
        raise LakeError(error.filename or root, reason, remedy) from error


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock of that file; raise LakeError at once when another process does. Its end, however, frees it."""
    with writing(path), path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reason = "is held: another archive or compaction is writing to this lake"
            raise LakeError(path, reason, "Wait for it to end, then start again") from None
        yield


def write_safely(path: Path, text: str) -> None:
    """Write a small file: after this call it is on the disk, and nobody ever reads half of it."""
    half = path.with_name(f".{path.name}.{os.getpid()}")
    with half.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    half.replace(path)
    sync(path.parent)


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Write a file: after this call it is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Have a file, or a folder's list of files, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sound(path: Path, size: int) -> Path:
    """Return the path of a file of that size. Raises LakeError for one that is missing or of another size."""
    try:
        found = path.stat().st_size
    except OSError as error:
        raise LakeError(path, f"cannot be read: {error.strerror}", DAMAGED) from None
    if found != size:
        raise LakeError(path, f"is damaged: {found:,} bytes instead of the {size:,} in the lake's log", DAMAGED)
    return path


def intact(path: Path, sha256: str) -> bytes:
    """Return the bytes of a file. Raises LakeError unless they are those of the checksum."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise LakeError(path, f"cannot be read: {error.strerror}", DAMAGED) from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise LakeError(path, "is damaged: its checksum is not the one in the lake's log", DAMAGED)
    return content


def json_of(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises LakeError."""
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise LakeError(path, f"cannot be read: {error.strerror}", "Check that this user may read it") from None
    except ValueError as error:
        raise LakeError(path, f"is no JSON ({error})", "Restore it from a backup") from None
    if not isinstance(found, dict):
        raise LakeError(path, "holds no JSON object", "Restore it from a backup")
    return found


def refuse_newer(path: Path, found: int, known: int) -> None:
    """Raise LakeError for a file of a version this program does not know."""
    if found > known:
        raise LakeError(
            path,
            f"was written by a newer django-dbtaskqueue (version {found}, and this one knows {known})",
            'Upgrade here: pip install --upgrade "django-dbtaskqueue[spark]"',
        )
