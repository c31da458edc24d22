"""Routes: what each takes and answers, how a request is read by it, and the OpenAPI 3.1 document of all of them.

The document is written from the routes and the types of what their views return, so a field stands in one place.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from datetime import datetime, timedelta
from functools import partial, wraps
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from django.contrib.auth import get_user_model
from django.contrib.auth.decorators import login_not_required
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db import InterfaceError, OperationalError
from django.db.models import Model, Q
from django.db.models.functions import Now
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.utils.crypto import constant_time_compare
from django.utils.translation import gettext as _
from django.views.decorators.csrf import csrf_exempt, csrf_protect

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core import __version__, logger
from django_dbtaskqueue.core.columns import PRIORITIES
from django_dbtaskqueue.core.durations import Rate
from django_dbtaskqueue.core.exceptions import SearchTooSlow, TaskQueueError, UnknownQueue, near_match
from django_dbtaskqueue.db import standby
from django_dbtaskqueue.db.session import alias_for, migrated
from django_dbtaskqueue.models import ApiToken
from django_dbtaskqueue.models.control import OPERATE_SCOPE
from django_dbtaskqueue.operations import permissions, serializers
from django_dbtaskqueue.operations.permissions import REASON_MAX_LENGTH, Actor, Scope
from django_dbtaskqueue.operations.serializers import BadInput, RowDocument, document_types
from django_dbtaskqueue.operations.verbs import PRIORITY, TaskVerb, VerbInput

JsonSchema = Mapping[str, Any]
PATH_PART = re.compile(r"<(\w+):(\w+)>")
SIMPLE: dict[Any, JsonSchema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    NoneType: {"type": "null"},
    datetime: {"type": "string", "format": "date-time"},
    timedelta: {"type": "number", "description": "seconds"},
    Rate: {"type": "string", "examples": ["100/s"]},
    object: {},
    Any: {},
}
ERRORS = {
    "400": "What was sent is not valid; the error names the field.",
    "401": "No session and no valid token.",
    "403": "The permission is missing.",
    "404": "It is not there, or the user may not view it.",
    "405": "Another method is needed.",
    "503": "The database did not answer in time; narrow the search.",
}
SECURITY = {
    "token": {"type": "http", "scheme": "bearer", "description": "manage.py taskqueue token USER makes one."},
    "session": {
        "type": "apiKey",
        "in": "cookie",
        "name": "sessionid",
        "description": "A browser's session; a POST needs Django's CSRF token, too.",
    },
}


@dataclass(frozen=True, slots=True)
class FieldType:
    """A kind of value: its JSON schema, and how it is read."""

    schema: JsonSchema
    read: Callable[[str, Any], Any]


TEXT_KIND = FieldType({"type": "string", "maxLength": serializers.MAX_INPUT_LENGTH}, serializers.text)
REASON_KIND = FieldType(
    {"type": "string", "maxLength": REASON_MAX_LENGTH}, partial(serializers.text, max_length=REASON_MAX_LENGTH)
)
WHOLE_KIND = FieldType({"type": "integer", "minimum": 0, "maximum": serializers.MAX_WHOLE_NUMBER}, serializers.whole)
POSITIVE_KIND = FieldType({**WHOLE_KIND.schema, "minimum": 1}, partial(serializers.whole, low=1))
WHOLE_LIST_KIND, TEXTS_KIND = (
    FieldType({"type": "array", "items": one.schema}, partial(serializers.list_of, kind=kind, name=name))
    for one, kind, name in ((WHOLE_KIND, int, "whole numbers"), (TEXT_KIND, str, "texts"))
)
ANY_KIND = FieldType({}, lambda _name, value: value)
PRIORITY_KIND = FieldType(
    {"type": ["integer", "null"], "minimum": PRIORITIES.least, "maximum": PRIORITIES.most},
    lambda name, value: None if value is None else serializers.whole(name, value, PRIORITIES.least, PRIORITIES.most),
)
MAX_PAGE_ROWS = 500  # a larger number counts as this
PAGE_KIND = FieldType(
    {**POSITIVE_KIND.schema, "maximum": MAX_PAGE_ROWS},
    lambda name, value: min(serializers.whole(name, value, low=1), MAX_PAGE_ROWS),
)
LENGTH_KIND = FieldType({"type": "string", "examples": ["30m", "1h30m", "PT30M"]}, serializers.length)
MOMENT_KIND = FieldType({"type": "string", "format": "date-time"}, serializers.moment)


def one_of(choices: Iterable[tuple[str, object]]) -> FieldType:
    """Return the kind of a few words, each given with its label."""
    words = [word for word, _label in choices]
    return FieldType({"type": "string", "enum": words}, partial(serializers.choice, known=words))


def _object(name: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise BadInput(name, f"must be a JSON object, not {serializers.shown_value(value)}.")
    return value


OBJECT_KIND = FieldType({"type": "object"}, _object)


@dataclass(frozen=True, slots=True)
class Field:
    """One value of a query string or of a body."""

    name: str
    kind: FieldType
    help: permissions.Text  # translated when it is shown
    default: Any = None
    required: bool = False
    as_sent: bool = False  # null is a value, too; what was not sent is not given


def verb_field(verb: TaskVerb, one: VerbInput) -> Field:
    """Return the field for an input of a verb, which reads it."""
    schema = {} if one.is_json or one is PRIORITY else TEXT_KIND.schema
    return Field(one.name, FieldType(schema, ANY_KIND.read), f"for {verb.name}: {one.label}", as_sent=True)


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One request, read by its route."""

    actor: Actor
    given: Mapping[str, Any]  # every field of the route, as sent or by its default; ``as_sent`` ones only if sent


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
    needs: str | type[Model] = ""  # which permission: in words, or the model whose rows the caller must be let view
    key: str = ""  # what the view returns is the value of this key; empty: it is the document

    @property
    def name(self) -> str:
        """The name of the view's function: the route's name in Django and its ``operationId``."""
        return str(getattr(self.view, "__name__", ""))

    @property
    def permission(self) -> str:
        return self.needs if isinstance(self.needs, str) else f"view_{self.needs._meta.model_name}"

    def answer(self, call: ApiCall, parts: Mapping[str, object]) -> object:
        if not isinstance(self.needs, str):
            may_view(call.actor, self.needs)
        found = self.view(call, **parts)
        return {self.key: found} if self.key else found

    def read(self, request: HttpRequest) -> dict[str, Any]:
        """Return the values of a request's fields; raise ``BadInput`` for a wrong or an unknown one."""
        if twice := next((name for name, values in request.GET.lists() if len(values) > 1), None):
            raise BadInput(twice[:100], "is there more than once. Join values of a search with commas.")
        found = _read(request.GET.dict(), self.query, "parameter")
        if self.body or self.method != "GET":
            found |= _read(serializers.json_object(request.body), self.body, "key")
        return found


def _read(sent: Mapping[str, object], fields: Sequence[Field], what: str) -> dict[str, Any]:
    known = [one.name for one in fields]
    for name in sent:
        if name not in known:
            words = f"is not a {what} here.{near_match(name[:100], known)} Known are {', '.join(known) or 'none'}."
            words += " A search goes into q, such as q=status:ERROR." if "q" in known else ""
            raise BadInput(name[:100], words)
    found: dict[str, Any] = {}
    for one in fields:
        if one.name in sent and (one.as_sent or sent[one.name] is not None):
            found[one.name] = one.kind.read(one.name, sent[one.name])
        elif one.required:
            raise BadInput(one.name, f"is missing: {one.help}.")
        elif not one.as_sent:
            found[one.name] = one.default
    return found


def document(routes: Sequence[Route], prefix: str = "") -> dict[str, Any]:
    """Return the OpenAPI document; ``prefix`` is the address of the API."""
    schemas: dict[str, JsonSchema] = {"Error": _closed({"error": SIMPLE[str]}, ["error"])}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        address = "/" + PATH_PART.sub(r"{\2}", route.path)
        paths.setdefault(address, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "django_dbtaskqueue", "version": __version__},
        "servers": [{"url": prefix or "/"}],
        "security": [{name: []} for name in SECURITY],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": SECURITY},
    }


def json_schema_of(kind: Any, schemas: dict[str, JsonSchema]) -> JsonSchema:
    """Return the schema of a type. That of a document goes to ``schemas``, and a reference to it is returned."""
    if kind in SIMPLE:
        return SIMPLE[kind]
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        row: RowDocument = inner[1]
        return _document_schema(row.name, row.text, row.types, schemas, row.optional)
    if origin in (Union, UnionType):
        return {"anyOf": [json_schema_of(one, schemas) for one in inner]}
    if is_typeddict(kind) or is_dataclass(kind):
        return _document_schema(kind.__name__, _first_paragraph(kind), document_types(kind), schemas)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": json_schema_of(inner[1], schemas)}
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return {"type": "array", "items": json_schema_of(inner[0], schemas)}
    raise TypeError(f"{kind!r} has no schema: give the API's document a type of JSON.")


def _document_schema(
    name: str, text: str, types: Mapping[str, object], schemas: dict[str, JsonSchema], optional: Sequence[str] = ()
) -> JsonSchema:
    if name not in schemas:
        schemas[name] = {}  # it may hold itself
        properties = {key: json_schema_of(kind, schemas) for key, kind in types.items()}
        schemas[name] = _closed(properties, sorted({*types}.difference(optional)), description=text)
    return {"$ref": f"#/components/schemas/{name}"}


def _operation(route: Route, schemas: dict[str, JsonSchema]) -> dict[str, Any]:
    answer = json_schema_of(get_type_hints(route.view, include_extras=True)["return"], schemas)
    if route.key:
        answer = _closed({route.key: answer}, [route.key])
    parts = [
        (name, "path", "", True, SIMPLE[int if kind == "int" else str]) for kind, name in PATH_PART.findall(route.path)
    ]
    sent = [(one.name, "query", str(one.help), one.required, one.kind.schema) for one in route.query]
    keys = ("name", "in", "description", "required", "schema")
    found: dict[str, Any] = {
        "operationId": route.name,
        "summary": _first_paragraph(route.view),
        "parameters": [{key: it for key, it in zip(keys, one, strict=True) if it != ""} for one in (*parts, *sent)],
        "responses": {
            str(route.status): _content("Done." if route.status == 200 else "It goes on in the background.", answer),
            **{code: _content(words, {"$ref": "#/components/schemas/Error"}) for code, words in ERRORS.items()},
        },
    }
    if needs := route.permission:
        found["description"] = f"Needs {needs}."
    if route.method != "GET":
        required = [one.name for one in route.body if one.required]
        body = _closed({one.name: {**one.kind.schema, "description": str(one.help)} for one in route.body}, required)
        found["requestBody"] = {"content": {"application/json": {"schema": body}}, "required": bool(required)}
    return found


def _closed(properties: Mapping[str, JsonSchema], required: Sequence[str], **more: str) -> JsonSchema:
    """Return the schema of an object without other keys."""
    return {"type": "object", **more, "properties": properties, "required": required, "additionalProperties": False}


def _content(words: str, schema: JsonSchema) -> dict[str, Any]:
    return {"description": words, "content": {"application/json": {"schema": schema}}}


def _first_paragraph(thing: Any) -> str:
    return " ".join((thing.__doc__ or "").partition("\n\n")[0].split())


# -- from a route to a Django view: who calls, what was sent, what is answered ----------------------------------------

READ_FROM_HEADER, AUTH_SCHEME, API_SOURCE = "X-Read-From", "Bearer ", "api"
LAST_USE_PRECISION = timedelta(minutes=1)  # a token's last use is written at most as often
Entry = Callable[..., HttpResponseBase]
Answerer = Callable[[HttpRequest, Actor | None, Mapping[str, Any]], HttpResponse]


def opened(view: Entry) -> Entry:
    """Answer 404 while ``DBTASKQUEUE["API"]`` is not True. The site's middlewares are kept away."""

    @csrf_exempt
    @login_not_required
    @wraps(view)
    def entry(request: HttpRequest, **parts: Any) -> HttpResponseBase:
        if not conf.settings().api:
            raise Http404('DBTASKQUEUE["API"] is not True.')
        return view(request, **parts)

    return entry


def entry_of(route: Route) -> Entry:
    """Return the Django view of a route."""

    def answer(request: HttpRequest, actor: Actor | None, parts: Mapping[str, Any]) -> HttpResponse:
        if request.method != route.method:
            return error(405, f"Use {route.method}.", Allow=route.method)
        if actor is None:
            return unknown_caller()
        for name, part in parts.items():
            if isinstance(part, str) and not serializers.is_storable(part):
                raise BadInput(name, "has a NUL character or half of a surrogate pair; leave it out.")
        call = ApiCall(actor, route.read(request))

        def get_reply() -> HttpResponse:
            where = standby.where_read()  # empty, unless a standby was asked first
            return reply(route.answer(call, parts), route.status, **({READ_FROM_HEADER: where} if where else {}))

        return standby.read_standby(get_reply) if route.method == "GET" else get_reply()

    return opened(wraps(route.view)(identified(answer)))


def identified(answer: Answerer) -> Entry:
    """Return a view that knows its caller; None is nobody.

    With a token the request acts for its user, and cookies are ignored; else for the session's, and CSRF is checked.
    """

    def with_session(request: HttpRequest, **parts: Any) -> HttpResponseBase:
        user = getattr(request, "user", None)
        known = user is not None and user.is_authenticated
        return _caught(lambda: answer(request, Actor(user, API_SOURCE) if known else None, parts))

    protected = csrf_protect(with_session)

    @wraps(answer)
    def entry(request: HttpRequest, **parts: Any) -> HttpResponseBase:
        token = request.headers.get("Authorization", "")
        if not token.startswith(AUTH_SCHEME):
            return protected(request, **parts)
        return _caught(lambda: answer(request, actor_of(token.removeprefix(AUTH_SCHEME).strip()), parts))

    return entry


def unknown_caller() -> HttpResponse:
    """Return the answer to a caller that is nobody."""
    words = "Log in, or send a token that is valid: Authorization: Bearer …"
    return error(401, words, **{"WWW-Authenticate": "Bearer"})


@opened
def not_found(request: HttpRequest) -> HttpResponse:
    """Answer an address that the table of routes does not have."""
    return error(404, "There is nothing at this address. openapi.json says what there is.")


def reply(document: object, status: int = 200, **headers: str) -> HttpResponse:
    """Return a document as an answer that is not cached."""
    headers["Cache-Control"] = "no-store"
    form = {"ensure_ascii": False}
    return JsonResponse(
        document, serializers.DocumentEncoder, safe=False, json_dumps_params=form, status=status, headers=headers
    )


def error(status: int, message: str, **headers: str) -> HttpResponse:
    """Return an error as an answer."""
    return reply({"error": message}, status, **headers)


def _caught(get_answer: Callable[[], HttpResponse]) -> HttpResponse:
    try:
        with migrated():
            return get_answer()
    except SearchTooSlow as failure:
        return error(503, str(failure), **{"Retry-After": "10"})
    except PermissionDenied as failure:
        return error(403, str(failure))
    except (Http404, UnknownQueue) as failure:
        return error(404, str(failure))
    except TaskQueueError as failure:
        return error(400, str(failure))
    except ImproperlyConfigured as failure:  # the site's fault, not the caller's: not migrated, or bad settings
        return error(503, str(failure), **{"Retry-After": "60"})
    except (OperationalError, InterfaceError) as failure:
        logger.warning("The JSON API could not reach the database: %s", failure)
        return error(503, "The database does not answer.", **{"Retry-After": "10"})


def may_view(actor: Actor, model: type[Model]) -> None:
    """Check the permission of the model: the table of a queue has its own."""
    permission = f"{model._meta.app_label}.view_{model._meta.model_name}"
    if actor.user is not None and not actor.user.has_perm(permission):
        text = _("%(who)s needs the permission %(permission)s.")
        raise PermissionDenied(text % {"who": actor.name, "permission": permission})


def actor_of(token: str) -> Actor | None:
    """Return whom a token stands for, or None for an unknown or an expired one, or one of an inactive user."""
    digest = hashlib.sha256(token.encode(errors="replace")).hexdigest()
    # All are compared, so that the time tells nothing.
    if found := [name for name, known in conf.settings().api_tokens.items() if constant_time_compare(known, digest)]:
        return _actor(found[0], Scope())
    tokens: Any = ApiToken.objects.using(alias_for("", None))
    live = tokens.filter(Q(expire_time__isnull=True) | Q(expire_time__gt=Now()), digest=digest)
    if (row := live.annotate(clock=Now()).first()) is None:
        return None
    if row.last_used_time is None or row.clock - row.last_used_time >= LAST_USE_PRECISION:
        tokens.filter(pk=row.pk).update(last_used_time=Now())
    actor = _actor(row.user, Scope(row.scope == OPERATE_SCOPE, row.queue_names))
    return actor if actor and actor.key == row.actor_id else None  # another user has got the name since


def _actor(name: str, scope: Scope) -> Actor | None:
    users: Any = get_user_model()
    user = users._default_manager.filter(**{users.USERNAME_FIELD: name, "is_active": True}).first()
    return None if user is None else Actor(user, API_SOURCE, scope)
