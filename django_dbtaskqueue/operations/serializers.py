"""Tasks, attempts and bulk operations as data, with secrets masked; and the bounds of what comes in from outside.

A document is a value, whose class names its keys, a row, whose columns a ``RowDocument`` names, or a mapping that a
``TypedDict`` describes. Each key stands once, and the API describes itself by them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime, timedelta
from itertools import accumulate
from typing import Annotated, Any, get_type_hints

from django.core.serializers.json import DjangoJSONEncoder
from django.db import models
from django.utils.timezone import make_aware
from django.utils.translation import gettext as _

from django_dbtaskqueue.core.columns import LISTED, LONG
from django_dbtaskqueue.core.durations import Rate, parse_length
from django_dbtaskqueue.core.exceptions import TaskQueueError, near_match
from django_dbtaskqueue.core.json import (
    MAX_WHOLE_NUMBER as MAX_WHOLE_NUMBER,
    is_storable as is_storable,
    loads_exactly,
    whole_number,
)
from django_dbtaskqueue.core.masking import masked, masked_text
from django_dbtaskqueue.core.states import COMPLETED
from django_dbtaskqueue.core.unique import kind_of
from django_dbtaskqueue.models import AbstractTask, Attempt, BulkOperation, FailureGroup, Task, TaskHistory
from django_dbtaskqueue.models.readable import JsonField

MESSAGE_WIDTH = 160  # characters of a message in one line
MAX_ERROR_WIDTH = 80  # characters
FINGERPRINT = re.compile(r"\bfingerprint:([0-9a-f]{8,40})")
FRAME = '  File "'  # how a line of a traceback begins
Document = dict[str, Any]
COLUMN_TYPES: Mapping[type, type] = {
    models.BooleanField: bool, models.CharField: str, models.DateTimeField: datetime, models.ForeignKey: int,
    models.IntegerField: int, models.TextField: str,
}  # fmt: skip


class DocumentEncoder(DjangoJSONEncoder):
    """Writes values, too: a length of time in seconds, a rate as text, another value by ``as_document``."""

    def default(self, o: object) -> object:
        if isinstance(o, timedelta):
            return o.total_seconds()
        if isinstance(o, Rate):
            return str(o)
        return as_document(o) if is_dataclass(o) else super().default(o)


def as_document(value: object) -> Document:
    """Return a value of a dataclass as data."""
    return {key: getattr(value, key) for key in _keys(type(value))}


def document_types(kind: Any) -> Mapping[str, object]:
    """Return the keys of the document of a dataclass or ``TypedDict``, each with its type."""
    hints, keys = get_type_hints(kind, include_extras=True), _keys(kind) if is_dataclass(kind) else ()
    own = {key: hints[key] if key in hints else get_type_hints(getattr(kind, key).fget)["return"] for key in keys}
    return own or hints


def _keys(kind: Any) -> Sequence[str]:
    """Return the fields and properties that a dataclass names in ``DOCUMENT``; otherwise all fields."""
    return getattr(kind, "DOCUMENT", None) or [one.name for one in fields(kind)]


@dataclass(frozen=True, eq=False, slots=True)
class RowDocument:
    """A row as data: columns under their own names, and further keys with their types."""

    name: str  # in the OpenAPI document
    text: str  # its description there
    model: type[models.Model]
    columns: Sequence[str]
    more: Mapping[str, object] = field(default_factory=dict)
    optional: Sequence[str] = ()  # columns that not every reader sees

    @property
    def types(self) -> Mapping[str, object]:
        columns = {name: _type_of(self.model._meta.get_field(name)) for name in (*self.columns, *self.optional)}
        return {**columns, **self.more}

    def of(self, row: models.Model, **given: object) -> Document:
        """Return a row as data; a key that is not given is the row's, and None if the row has no such column."""
        keys = (*self.columns, *self.more)
        return {name: given.pop(name) if name in given else getattr(row, name, None) for name in keys} | given


def _type_of(column: Any) -> Any:
    if isinstance(column, JsonField):
        kind: type = list[column.of] if column.shape is list else dict[str, column.of] if column.shape else object
    else:
        kind = next(kind for known, kind in COLUMN_TYPES.items() if isinstance(column, known))
    return kind | None if column.null else kind


SUMMARY = RowDocument(
    "TaskSummary", "A task in a list. Message: its result or error in one line, secrets masked.", Task, LISTED,
    {"message": str},
)  # fmt: skip
ATTEMPT = RowDocument(
    "Attempt", "A failed attempt. Its traceback needs the permission to see payloads.", Attempt,
    ("task_id", "queue", "attempt", "poller_instance", "finish_time"), {"error": str}, optional=("traceback",),
)  # fmt: skip
OPERATION = RowDocument(
    "Operation", "A bulk operation. The estimate is null where counting took too long.", BulkOperation,
    (
        "id", "verb", "query", "actor", "reason", "state", "estimate", "estimate_more", "changed", "skipped", "skips",
        "note", "create_time", "start_time", "finish_time",
    ),
    {"progress": float},
)  # fmt: skip
TaskSummary = Annotated[Document, SUMMARY]
AttemptDocument = Annotated[Document, ATTEMPT]
OperationDocument = Annotated[Document, OPERATION]


def summary(task: AbstractTask | TaskHistory, *, payload: bool = True) -> TaskSummary:
    """Return what a list shows of a task; without ``payload`` no result, but the one line of an error."""
    return SUMMARY.of(task, message=message_of(task.process_result) if payload or task.status != COMPLETED else "")


def detail(task: AbstractTask | TaskHistory, *, payload: bool) -> Document:
    """Return all of a task, secrets masked; what was enqueued and what came of it only with ``payload``."""
    found = summary(task, payload=payload)
    if isinstance(task, TaskHistory):
        found |= {"id": task.task_id, "moved_time": task.moved_time}
    if payload:
        found |= {name: masked(getattr(task, name)) for name in LONG}
        found["process_result"] = masked_text(task.process_result or "")
    return found


def attempt_of(row: Attempt, *, payload: bool = True) -> AttemptDocument:
    """Return a failed attempt, secrets masked; without ``payload`` the one line of its error only."""
    error = masked_text(error_of(row)) if payload else message_of(error_of(row))
    return ATTEMPT.of(row, error=error, **({"traceback": masked_text(row.traceback)} if payload else {}))


def error_of(row: Attempt) -> str:
    """Return the error of a failed attempt, not masked."""
    return f"{row.error_type}: {row.message}" if row.error_type else row.message


def message_of(text: str | None, width: int = MESSAGE_WIDTH) -> str:
    """Return a result or error as one line of at most ``width`` characters, with secrets masked.

    Of a traceback it is the error, without the module of its class. Of any other text it is the first line. A stored
    traceback can lack its beginning, so the frames tell what it is.
    """
    if not (lines := [line for line in masked_text(text or "").splitlines() if line.strip()]):
        return ""
    line = lines[0]
    if frames := [place for place, one in enumerate(lines) if one.startswith((FRAME, "Traceback ("))]:
        after = lines[frames[-1] + 1 :] or lines
        line = short_error(next((one for one in after if not one[0].isspace()), after[-1]))
    line = line.strip()
    return line if len(line) <= width else line[: width - 1] + "…"


def short_error(line: str) -> str:
    """Return "PlaneUnknown: N14228" for "flights.rules.PlaneUnknown: N14228", and any other text as it is."""
    kind, colon, message = line.partition(":")
    return kind.rpartition(".")[2] + colon + message if re.fullmatch(r"[\w.]+", kind) else line


def with_errors(queries: Sequence[str], groups: models.QuerySet[FailureGroup]) -> list[str]:
    """Return searches with the error in the place of the fingerprint of each of these failure groups."""
    prints = {found for query in queries for found in FINGERPRINT.findall(query)}
    words = {
        group.pk: message_of(short_error(f"{group.error_type}: {group.message}".removeprefix(": ")), MAX_ERROR_WIDTH)
        for group in (groups.filter(pk__in=prints) if prints else ())
    }
    return [FINGERPRINT.sub(lambda found: words.get(found[1]) or found[0], query) for query in queries]


def uniqueness_note(reference: str | None) -> str:
    """Return what the rule of uniqueness does that derived a task's reference; "" if no rule did."""
    kind = kind_of(reference)
    if kind and str(reference).count(":") > 1:
        text = _("A rule of uniqueness (%(kind)s) does not hold it any more: a later call has inserted a new task.")
        return text % {"kind": kind}
    words = {
        "unique": _("By the rule unique, a further call with an equal payload inserts no task: it returns this one."),
        "throttle": _("By the rule throttle, a call with an equal payload returns this task until the period is over."),
        "debounce": _("By the rule debounce, a call with an equal payload replaces this task until a poller takes it."),
    }
    return words.get(kind, "")


# Texts, numbers, times and JSON from outside, read once or refused with the field's name: no value reaches the database
# that it cannot store, or that Python cannot read back.

MAX_BODY_BYTES = 262_144
MAX_BODY_DEPTH = 32  # of lists and objects in each other
MAX_INPUT_LENGTH = 4096  # characters of a text; a search may have as many
YEARS = range(1970, 2201)  # with a day more, or in another time zone, Python can still read these


class BadInput(TaskQueueError):
    """A value from outside is not valid; ``field`` is its name."""

    def __init__(self, field: str, reason: str) -> None:
        self.field = field
        super().__init__(f"{field!r} {reason}")


def text(field: str, value: object, max_length: int = MAX_INPUT_LENGTH) -> str:
    """Return a text that the database can store."""
    if not isinstance(value, str):
        raise BadInput(field, f"must be a text, not {shown_value(value)}.")
    if len(value) > max_length:
        raise BadInput(field, f"has {len(value):,} characters; at most {max_length:,} are allowed.")
    if not is_storable(value):
        raise BadInput(field, "has a NUL character or half of a surrogate pair; leave it out.")
    return value


def whole(field: str, value: object, low: int = 0, high: int = MAX_WHOLE_NUMBER) -> int:
    """Return a whole number, also from text."""
    number = whole_number(value) if isinstance(value, str) else value
    if type(number) is not int:
        raise BadInput(field, f"must be a whole number, not {shown_value(value)}.")
    if not low <= number <= high:
        raise BadInput(field, f"must be a whole number from {low} to {high}, not {shown_value(value)}.")
    return number


def list_of(field: str, value: object, kind: type, name: str) -> list[Any]:
    """Return a list of whole numbers or of texts."""
    if not isinstance(value, list) or not all(type(one) is kind for one in value):
        raise BadInput(field, f"must be a list of {name}, not {shown_value(value)}.")
    read: Callable[[str, object], object] = whole if kind is int else text
    return [read(field, one) for one in value]


def choice(field: str, value: object, known: Sequence[str]) -> str:
    """Return one of a few words."""
    if value not in known:
        names = ", ".join(f'"{one}"' for one in known)
        raise BadInput(field, f"must be one of {names}, not {shown_value(value)}.{near_match(str(value)[:100], known)}")
    return str(value)


def length(field: str, value: object) -> timedelta:
    """Return a length of time of at most 100 years."""
    try:
        return parse_length(value)
    except ValueError as error:
        raise BadInput(field, f"is not valid: {error}.") from None


def moment(field: str, value: object) -> datetime:
    """Return a time from 1970 to 2200; without an offset it is in the current time zone."""
    try:
        found = datetime.fromisoformat(text(field, value))
    except ValueError:
        raise BadInput(field, f"must be a time such as 2026-11-20T08:00+00:00, not {shown_value(value)}.") from None
    if found.year not in YEARS:
        raise BadInput(field, f"must be a time from the year {YEARS[0]} to {YEARS[-1]}, not {shown_value(value)}.")
    return found if found.tzinfo else make_aware(found)


def json_object(body: bytes) -> dict[str, object]:
    """Return the JSON object of a request's body."""
    if len(body) > MAX_BODY_BYTES:
        raise BadInput("body", f"has {len(body):,} bytes; at most {MAX_BODY_BYTES:,} are allowed.")
    nested = accumulate((char in b"[{") - (char in b"]}") for char in body)  # in texts, too: that is never too few
    if max(nested, default=0) > MAX_BODY_DEPTH:
        raise BadInput("body", f"has lists and objects more than {MAX_BODY_DEPTH} deep.")
    try:
        found = loads_exactly(body or b"{}")
    except ValueError as error:
        raise BadInput("body", f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadInput("body", f"must be a JSON object, not {type(found).__name__}.")
    return found


def shown_value(value: object) -> str:
    """Return a refused value as an error message shows it."""
    described = repr(value)
    return described if len(described) <= 100 else f"{described[:100]}…"
