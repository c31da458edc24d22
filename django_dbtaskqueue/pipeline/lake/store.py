"""Where the files of a lake are: in a local folder, or in an object store, such as ``s3://BUCKET/FOLDER``.

A write is durable when it returns: the folder flushes it to the disk, the object store confirms it. ``deltalake`` gives
access to an object store, for the log and for the files. It finds keys and endpoint in the environment, or takes the
role of the machine. No key is part of a URL, a log, a row or the text of an error.
"""

from __future__ import annotations

import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, ClassVar
from urllib.parse import unquote, urlsplit

import pyarrow as pa
from deltalake.exceptions import DeltaError
from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import FileSelector

from django_dbtaskqueue.core.exceptions import LakeError

OBJECT_STORES = {"s3": "s3", "s3a": "s3", "gs": "gs", "abfss": "abfss", "hdfs": "hdfs"}
PLAIN_URL = re.compile(r"(?:[\w.-]+@)?[\w.-]+(?::\d+)?(?:/[\w.=+~-]+)*/*", re.ASCII)
KEYS_BELONG_IN_THE_ENVIRONMENT = (
    "Write it as s3://BUCKET/FOLDER. Set keys in the environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "or give the machine a role"
)
# Two writers of one version of the log: the store refuses the second, which then tries the next version.
CONDITIONAL_PUT = {"aws_conditional_put": "etag", "aws_s3_allow_unsafe_rename": "false"}
READ_BYTES = 8 * 2**20
MAX_REASON_CHARACTERS = 300
DAMAGED_FILE_REMEDY = "Restore it from a backup; `check` names all damaged files"
SECRET_VARIABLE = re.compile("SECRET|TOKEN|PASSWORD|KEY|SAS|CREDENTIAL", re.IGNORECASE)
MIN_SECRET_CHARACTERS = 6  # of a value that is replaced in the text of an error
NOISE = re.compile(r"\x1b\[\d*m|<\?xml[^>]*>|</?[A-Za-z]+>|↳")
QUERY = re.compile(r"(?<=[\w/])\?[^\s,}]+")


@dataclass(frozen=True)
class LakeStore(ABC):
    """The files below a folder or URL. Names are relative to it. It can be sent to Spark's tasks."""

    root: str
    options: ClassVar[Mapping[str, str]] = {}  # of delta-rs

    def place(self, name: str) -> str:
        """Return a name as people and errors give it: a path or a URL."""
        return f"{self.root}/{name}"

    def uri(self, name: str) -> str:
        """Return a name as delta-rs takes it."""
        return self.place(name)

    @property
    def path(self) -> Path | None:
        """The folder; None in an object store."""
        return None

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of files and folders directly below the root."""

    @abstractmethod
    def open(self, name: str) -> Any:
        """Open a file to read its bytes."""

    def read(self, name: str) -> bytes:
        """Return the bytes of a file."""
        with self.open(name) as content:
            return bytes(content.read())

    def sha256(self, name: str) -> str:
        """Return the checksum of a file, of which only a part is in memory at a time."""
        digest = hashlib.sha256()
        with self.open(name) as content:
            while part := content.read(READ_BYTES):
                digest.update(part)
        return digest.hexdigest()

    @abstractmethod
    def write(self, name: str, content: memoryview) -> None:
        """Write a file. No one sees a part of it under the name of a commit."""

    def make(self, name: str) -> None:  # noqa: B027 -- object stores have no folders
        """Make a folder."""

    def flush(self, *folders: str) -> None:  # noqa: B027 -- an object store keeps what it confirmed
        """Make the files durable that were added to these folders."""

    def flush_log(self, table: str, before: int) -> None:  # noqa: B027 -- as flush
        """Make the commits of a table durable that came after the version ``before``."""


class LocalFolder(LakeStore):
    """A folder of a local or mounted file system."""

    @property
    def path(self) -> Path:
        return Path(self.root)

    def uri(self, name: str) -> str:
        return (self.path / name).as_uri()

    def names(self) -> list[str]:
        return [one.name for one in self.path.iterdir()] if self.path.is_dir() else []

    def open(self, name: str) -> BinaryIO:
        return (self.path / name).open("rb")

    def write(self, name: str, content: memoryview) -> None:
        place = self.path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
        _sync(place)

    def make(self, name: str) -> None:
        (self.path / name).mkdir(parents=True, exist_ok=True)

    def flush(self, *folders: str) -> None:
        _sync(*(self.path / one for one in folders))

    def flush_log(self, table: str, before: int) -> None:
        log = self.path / table / "_delta_log"
        _sync(*(one for one in log.glob("*.json") if one.stem > f"{before:020}"), log)
        if before < 0:  # the table is new
            _sync(log.parent, self.path, self.path.parent)


class ObjectStore(LakeStore):
    """A folder of S3, Google Cloud Storage, Azure or HDFS, by its URL. A file appears whole, when its write returns."""

    options: ClassVar[Mapping[str, str]] = CONDITIONAL_PUT

    def names(self) -> list[str]:
        found = _files(self.root).get_file_info_selector(FileSelector("", allow_not_found=True))
        return [one.base_name for one in found]

    def open(self, name: str) -> pa.NativeFile:
        return _files(self.root).open_input_stream(name)

    def write(self, name: str, content: memoryview) -> None:
        _files(self.root).put(name, content)


class _Files(DeltaStorageHandler):
    """The files of an object store. Arrow's stream for writing passes what delta-rs does not take."""

    def put(self, name: str, content: memoryview) -> None:
        out = self._handler.open_output_stream(name, None)
        for start in range(0, len(content), READ_BYTES):
            out.write(bytes(content[start : start + READ_BYTES]))
        out.close()  # type: ignore[attr-defined]  # the stub of deltalake 1.6 lacks it


@lru_cache(maxsize=8)
def _files(root: str) -> _Files:
    return _Files(root, dict(CONDITIONAL_PUT))


def store_of(path: str | os.PathLike[str]) -> LakeStore:
    """Return the store of a path, a ``file:`` URL, or a URL of an object store. Raises LakeError for another one.

    The error does not repeat a URL that may hold a key.
    """
    text = os.fspath(path)
    scheme, separator, rest = text.partition("://")
    if not separator and "%" not in text:
        return LocalFolder(str(Path(text).absolute()))
    parts = urlsplit(text)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return LocalFolder(str(Path(unquote(parts.path)).absolute()))
    if scheme not in OBJECT_STORES or not separator:
        stores = ", ".join(f"{one}://" for one in OBJECT_STORES)
        reason = f"is neither a local path without a percent sign nor a URL of a known store ({stores})"
        raise LakeError(f"{scheme}://…" if separator else text, reason, "Write it as s3://BUCKET/FOLDER, or as a path")
    if not PLAIN_URL.fullmatch(rest) or ("@" in rest and scheme != "abfss"):
        reason = "has a user, a key, a query, or a character other than ASCII letters, digits and . _ = + ~ -"
        raise LakeError(f"{scheme}://…", reason, KEYS_BELONG_IN_THE_ENVIRONMENT)
    return ObjectStore(f"{OBJECT_STORES[scheme]}://{rest.rstrip('/')}")


# -- errors ------------------------------------------------------------------------------------------------------------


def writing(place: str) -> AbstractContextManager[None]:
    """Raise the errors of the block as LakeError with a remedy."""
    remedy = "Check path, owner and free space, or give another folder with --lake"
    if "://" in place:
        remedy = "Check the URL, the keys in the environment, the endpoint and the rights on the folder"
    return reading(place, remedy, "written")


@contextmanager
def reading(place: str, remedy: str = DAMAGED_FILE_REMEDY, done: str = "read") -> Iterator[None]:
    """Raise the errors of the block as LakeError with a remedy."""
    try:
        yield
    except (OSError, DeltaError, pa.ArrowInvalid) as error:
        found = getattr(error, "filename", None) or place
        raise LakeError(found, f"cannot be {done}: {_text(error)}", remedy) from None


def _text(error: Exception) -> str:
    """Return what happened, in one line, without queries of URLs and values of secret variables."""
    if found := getattr(error, "strerror", None):
        return str(found)
    text = " ".join(QUERY.sub("", NOISE.sub(" ", str(error))).split())
    for name, value in os.environ.items():
        if SECRET_VARIABLE.search(name) and len(value) >= MIN_SECRET_CHARACTERS:
            text = text.replace(value, "***")
    return text[:MAX_REASON_CHARACTERS].rstrip(". ")


def _sync(*paths: Path) -> None:
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
