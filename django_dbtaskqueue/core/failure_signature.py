"""An error as text that any database accepts, secrets masked, and what it has in common with others. Nothing raises."""

import logging
import re
import sysconfig
import traceback
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, Self

from django_dbtaskqueue.core import json as json_payload, logger
from django_dbtaskqueue.core.exceptions import dotted
from django_dbtaskqueue.core.masking import masked_text

TRACEBACK_BYTES = 16_000
MASKED_AROUND = 4000  # characters beside a cut, by which a secret at the cut is found
OWN_FOLDER = str(Path(__file__).parents[1])
LIBRARY_FOLDERS = tuple(
    f"{place}/" for place in {OWN_FOLDER, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))}
)
# What differs between two failures of one kind: quoted values, then addresses and ids, then numbers.
VARYING_PATTERNS = (
    (re.compile(r"'[^'\n]{0,200}'|\"[^\"\n]{0,200}\""), "'…'"),
    (re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b|\b0x[0-9a-fA-F]+\b"), "#"),
    (re.compile(r"\b(?=[0-9a-fA-F]*[0-9])[0-9a-fA-F]{12,}\b"), "#"),
    (re.compile(r"[0-9][0-9.,:_-]*"), "#"),
)
MAX_MESSAGE_CHARS = 500  # of a group or of a line of the log
COMPARED_CHARS = 200  # of the message, for the fingerprint


class FailureSignature(NamedTuple):
    """What failures of one group have in common. ``fingerprint`` is a hash of it and of the queue."""

    fingerprint: str
    error_type: str
    frame: str  # module:function of the project's innermost call, or ''
    message: str  # with what varies replaced
    newest: str = ""  # the message of this failure


class RemoteError(str):
    """The text of an error of another process, with the signature that was found there from its frames."""

    signature: FailureSignature
    description: dict[str, str]

    @classmethod
    def of(cls, error: BaseException | str, queue: str) -> Self:
        """Return what to send to another process of an error. Never raises."""
        remote = cls(json_payload.clean_text(_one_text(error)))
        remote.signature, remote.description = signature_of(error, queue), describe(error, queue)
        return remote


def describe(error: BaseException | str, queue: str) -> dict[str, str]:
    """Return an error as text any database accepts: type, message, traceback, fingerprint. Never raises."""
    if isinstance(error, RemoteError):
        return error.description
    name, message = _type_and_message(error)
    frames = ""
    if not isinstance(error, str):
        try:
            frames = "".join(traceback.format_exception(error))
        except BaseException as repr_failed:
            message = frames = _repr_failed(name, repr_failed)
    clean = json_payload.clean_text  # first a cut: to mask a text of megabytes takes seconds
    frames = masked_text(clean(frames[-TRACEBACK_BYTES - MASKED_AROUND :]))
    return {
        "error_type": clean(name)[:200],
        "message": clean(masked_text(message[: 4000 + MASKED_AROUND]))[:4000],
        "traceback": json_payload.tail_bytes(frames, TRACEBACK_BYTES),
        "failure_key": signature_of(error, queue).fingerprint,
    }


def signature_of(error: BaseException | str, queue: str) -> FailureSignature:
    """Return the group of failures that an error belongs to. Never raises."""
    if isinstance(error, RemoteError):
        return error.signature
    name, message = _type_and_message(error)
    clean = json_payload.clean_text
    name, frame = clean(name)[:200], clean(_frame(error))[:300]
    said = masked_text(message[:4000]).strip().partition("\n")[0]
    message = clean(normalised(said))[:MAX_MESSAGE_CHARS]
    text = "\0".join((queue, name, frame, message[:COMPARED_CHARS]))
    digest = blake2b(text.encode("utf-8", "replace"), digest_size=20).hexdigest()
    return FailureSignature(digest, name, frame, message, clean(said)[:MAX_MESSAGE_CHARS])


def masked_line(error: BaseException | str) -> str:
    """Return ``Type: message``, or a text as it is, masked, cut and in one line. Never raises."""
    text = masked_text(_one_text(error)[: MAX_MESSAGE_CHARS + MASKED_AROUND])
    return text.replace("\n", " ").replace("\r", " ")[:MAX_MESSAGE_CHARS]


def _one_text(error: BaseException | str) -> str:
    name, message = _type_and_message(error)
    return f"{name.rpartition('.')[2]}: {message}" if name else message


def mask_record(record: logging.LogRecord) -> bool:
    """A filter of the package's logger: texts, what errors say and tracebacks are logged with secrets masked."""
    if isinstance(record.args, tuple):
        record.args = tuple(
            masked_text(_type_and_message(one)[1][:TRACEBACK_BYTES]) if isinstance(one, str | BaseException) else one
            for one in record.args
        )
    if record.exc_info and record.exc_info[1]:
        record.exc_text = masked_text("".join(traceback.format_exception(record.exc_info[1]))[-TRACEBACK_BYTES:])
    return True


def normalised(message: str) -> str:
    """Return the first line of a message with what varies from case to case replaced."""
    line = message.strip().partition("\n")[0]
    for pattern, placeholder in VARYING_PATTERNS:
        line = pattern.sub(placeholder, line)
    return line


def _type_and_message(error: BaseException | str) -> tuple[str, str]:
    if isinstance(error, str):
        return "", error
    name = dotted(type(error))
    try:
        return name, str(error)
    except BaseException as repr_failed:
        return name, _repr_failed(name, repr_failed)


def _repr_failed(name: str, repr_failed: BaseException) -> str:
    return f"<{name}; repr failed with {type(repr_failed).__name__}>"


def _frame(error: BaseException | str) -> str:
    """Return the innermost place of the project's own code the error came through."""
    found, step = "", None if isinstance(error, str) else error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if not code.co_filename.startswith((*LIBRARY_FOLDERS, "<frozen")):
            found = f"{step.tb_frame.f_globals.get('__name__', '?')}:{code.co_qualname}"
        step = step.tb_next
    return found


logger.addFilter(mask_record)
