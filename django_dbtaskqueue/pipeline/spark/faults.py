"""What an error says to the person who started a job: one paragraph with a remedy, instead of a stack trace."""

from __future__ import annotations

import re

from django_dbtaskqueue.core.exceptions import TaskQueueError

SECRET = re.compile(r"(?i)(password|passwd|pwd)=('[^']*'|\S+)|(?<=://)([^:/@\s]+):[^@\s]+(?=@)")
JAVA_NOISE = re.compile(r"\s*(JVM stacktrace:|Driver stacktrace:|\n\tat |SQLSTATE: \w+).*", re.DOTALL)
REMEDIES = {
    "PATH_NOT_FOUND": "Check the path; Spark resolves it on the driver and on every executor.",
    "UNRESOLVED_COLUMN": "Check the names of the columns you gave.",
    "FAILED_READ_FILE": "The file is damaged or no Parquet: restore it, or take it out of the folder.",
    "CANNOT_READ_FILE_FOOTER": "The file is damaged or no Parquet: restore it, or take it out of the folder.",
    "UNABLE_TO_INFER_SCHEMA": "The folder holds no file of that format.",
    "PATH_ALREADY_EXISTS": "Give a path that does not exist yet.",
}


def one_paragraph(error: BaseException) -> str:
    """Return the error as one paragraph, without a password and without the noise of other programs."""
    if isinstance(error, TaskQueueError):
        return without_secrets(str(error))
    kind = type(error)
    text = f"{kind.__name__}: {str(error) or 'no message'}"
    if kind.__module__.startswith(("pyspark", "py4j")):
        text = _spark(str(error))
    elif kind.__module__.startswith(("psycopg", "sqlite3", "adbc")):
        text = f"The database says: {error}. Check that it runs, that its address is right, and that it is migrated"
    text = JAVA_NOISE.sub("", text).strip()
    return without_secrets(re.sub(r"\s*\n\s*", " ", text).rstrip(".") + ".")


def without_secrets(text: str) -> str:
    """Return the text without passwords of connection strings and URLs."""
    return SECRET.sub(lambda found: f"{found[1]}=***" if found[1] else f"{found[3]}:***", text)


def _spark(text: str) -> str:
    python = re.findall(r"^(\w+(?:\.\w+)*(?:Error|Exception|Rejected|Unknown\w*): .+)$", text, re.MULTILINE)
    remedies = [remedy for name, remedy in REMEDIES.items() if name in text]
    return " ".join([f"Spark says: {python[-1] if python else text}", *remedies[:1]])
