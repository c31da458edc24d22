"""The table of routes: what each takes and answers, and how a request is read by it.

``openapi`` writes the document of the API from the same table, so that a field stands in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from django.http import HttpRequest

from django_dbtaskqueue.core.exceptions import near_match
from django_dbtaskqueue.operations import bounds
from django_dbtaskqueue.operations.bounds import BadInput
from django_dbtaskqueue.operations.permissions import REASON_MAX_LENGTH, Actor
from django_dbtaskqueue.operations.verb_inputs import PRIORITY, VerbInput
from django_dbtaskqueue.operations.verbs import TaskVerb

if TYPE_CHECKING:
    from django.utils.functional import _StrPromise

JsonSchema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FieldType:
    """A kind of value: its JSON schema, and how it is read."""

    schema: JsonSchema
    read: Callable[[str, Any], Any]


TEXT_KIND = FieldType({"type": "string", "maxLength": bounds.MAX_INPUT_LENGTH}, bounds.text)
REASON_KIND = FieldType(
    {"type": "string", "maxLength": REASON_MAX_LENGTH}, partial(bounds.text, max_length=REASON_MAX_LENGTH)
)
WHOLE_KIND = FieldType({"type": "integer", "minimum": 0, "maximum": bounds.MAX_WHOLE_NUMBER}, bounds.whole)
POSITIVE_KIND = FieldType({**WHOLE_KIND.schema, "minimum": 1}, partial(bounds.whole, low=1))
WHOLE_LIST_KIND = FieldType({"type": "array", "items": WHOLE_KIND.schema}, bounds.whole_list)
ANY_KIND = FieldType({}, lambda _name, value: value)
PRIORITY_KIND = FieldType(
    {"type": "integer", "minimum": -32768, "maximum": 32767}, partial(bounds.whole, low=-32768, high=32767)
)
LENGTH_KIND = FieldType({"type": "string", "examples": ["30m", "1h30m", "PT30M"]}, bounds.length)
MOMENT_KIND = FieldType({"type": "string", "format": "date-time"}, bounds.moment)


def up_to(most: int) -> FieldType:
    """Return the kind of a number from 1 to ``most``; a larger one counts as ``most``."""
    return FieldType(
        {**POSITIVE_KIND.schema, "maximum": most}, lambda name, value: min(bounds.whole(name, value, low=1), most)
    )


def one_of(*words: str) -> FieldType:
    """Return the kind of a few words."""
    return FieldType({"type": "string", "enum": list(words)}, lambda name, value: bounds.choice(name, value, words))


def _object(name: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise BadInput(name, f"must be a JSON object, not {bounds.shown(value)}.")
    return value


def _texts(name: str, value: object) -> list[str]:
    if not isinstance(value, list):
        raise BadInput(name, f"must be a list of texts, not {bounds.shown(value)}.")
    return [bounds.text(name, one) for one in value]


OBJECT_KIND = FieldType({"type": "object"}, _object)
TEXTS_KIND = FieldType({"type": "array", "items": TEXT_KIND.schema}, _texts)


@dataclass(frozen=True, slots=True)
class Field:
    """One value of a query string or of a body."""

    name: str
    kind: FieldType
    help: str | _StrPromise  # translated when it is shown
    default: Any = None
    required: bool = False


def verb_field(verb: TaskVerb, one: VerbInput) -> Field:
    """Return the field for an input of a verb; the verb itself makes its option of what was sent."""

    def read(name: str, value: object) -> object:
        try:
            one.read(value)
        except (TypeError, ValueError) as error:
            raise BadInput(name, f"{error}.") from None
        return value

    schema = {} if one.is_json or one is PRIORITY else TEXT_KIND.schema
    return Field(one.name, FieldType(schema, read), f"for {verb.name}: {one.label}")


@dataclass(frozen=True, slots=True)
class Call:
    """One request, read by its route."""

    request: HttpRequest
    actor: Actor
    given: Mapping[str, Any]  # every field of the route, as sent or by its default


View = Callable[..., object]  # (call, **parts of the path) -> a document, or the value of its key


@dataclass(frozen=True, slots=True)
class Route:
    """One request that the API answers. The view's docstring and return type are its documentation."""

    method: str
    path: str  # as Django's ``path`` reads it
    view: View
    query: Sequence[Field] = ()
    body: Sequence[Field] = ()
    status: int = 200
    needs: str = ""  # in words: which permission
    key: str = ""  # what the view returns is the value of this key; empty: it is the document

    @property
    def name(self) -> str:
        """The name of the view's function: the route's name in Django and its ``operationId``."""
        return str(getattr(self.view, "__name__", ""))

    def answer(self, call: Call, parts: Mapping[str, object]) -> object:
        """Return the document that answers a call."""
        found = self.view(call, **parts)
        return {self.key: found} if self.key else found

    def read(self, request: HttpRequest) -> dict[str, Any]:
        """Return the values of a request's fields; raise ``BadInput`` for a wrong or an unknown one."""
        sent: Mapping[str, object] = request.GET.dict()
        self._check_names(sent, self.query, "parameter")
        found = _read(sent, self.query)
        if self.body or self.method != "GET":
            sent = bounds.json_object(request.body)
            self._check_names(sent, self.body, "key")
            found |= _read(sent, self.body)
        return found

    def _check_names(self, sent: Mapping[str, object], fields: Sequence[Field], what: str) -> None:
        known = [one.name for one in fields]
        for name in sent:
            if name not in known:
                words = f"is not a {what} here.{near_match(name[:100], known)} Known are {', '.join(known) or 'none'}."
                if "q" in known:
                    words += " A search goes into q, such as q=status:ERROR."
                raise BadInput(name[:100], words)


def _read(sent: Mapping[str, object], fields: Sequence[Field]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in fields:
        if sent.get(one.name) is not None:
            found[one.name] = one.kind.read(one.name, sent[one.name])
        elif one.required:
            raise BadInput(one.name, f"is missing: {one.help}.")
        else:
            found[one.name] = one.default
    return found
