"""The OpenAPI 3.1 document of the API, written from the table of routes and the types of what the views return."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from datetime import datetime
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from django.http import HttpRequest, HttpResponse

from django_dbtaskqueue.api.auth import opened, reply
from django_dbtaskqueue.api.routing import Field, JsonSchema, Route
from django_dbtaskqueue.core import __version__
from django_dbtaskqueue.core.columns import BY_NAME, INTEGER_TYPES, LISTED, LONG
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.operations.explain import Explanation
from django_dbtaskqueue.operations.serializers import AttemptDocument

PATH_PART = re.compile(r"<(\w+):(\w+)>")
SIMPLE: dict[Any, JsonSchema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    NoneType: {"type": "null"},
    datetime: {"type": "string", "format": "date-time"},
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


def document_of(routes: Sequence[Route]) -> Callable[[HttpRequest], Any]:
    """Return the view that serves the document of these routes. It needs no user: it holds no data."""

    @opened
    def openapi(request: HttpRequest) -> HttpResponse:
        prefix = request.path.removesuffix("/openapi.json")
        return reply(document(routes, prefix))

    return openapi


def document(routes: Sequence[Route], prefix: str = "") -> dict[str, Any]:
    """Return the OpenAPI document; ``prefix`` is the address of the API."""
    schemas: dict[str, JsonSchema] = {
        "Error": _object({"error": SIMPLE[str]}, ["error"]),
        "TaskSummary": _task_schema(LISTED),
        "Task": _task_schema(LISTED, optional=(*LONG, "process_result"), page=True),
    }
    for kind in (AttemptDocument, Explanation):
        schema_of(kind, schemas)
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


def schema_of(kind: Any, schemas: dict[str, JsonSchema]) -> JsonSchema:
    """Return the schema of a type. That of a document goes to ``schemas``, and a reference to it is returned."""
    if kind in SIMPLE:
        return SIMPLE[kind]
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:  # of a document whose fields the table of columns names
        return _ref(inner[1])
    if origin in (Union, UnionType):
        return {"anyOf": [schema_of(one, schemas) for one in inner]}
    if is_typeddict(kind) or is_dataclass(kind):
        if kind.__name__ not in schemas:
            schemas[kind.__name__] = {}  # it may hold itself
            hints = get_type_hints(kind, include_extras=True)
            properties = {name: schema_of(one, schemas) for name, one in hints.items()}
            required = sorted(getattr(kind, "__required_keys__", hints))
            schemas[kind.__name__] = _object(properties, required, description=_first_paragraph(kind))
        return _ref(kind.__name__)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": schema_of(inner[1], schemas)}
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return {"type": "array", "items": schema_of(inner[0], schemas)}
    raise TypeError(f"{kind!r} has no schema: give the API's document a type of JSON.")


def _operation(route: Route, schemas: dict[str, JsonSchema]) -> dict[str, Any]:
    answer = schema_of(get_type_hints(route.view, include_extras=True)["return"], schemas)
    if route.key:
        answer = _object({route.key: answer}, [route.key])
    found: dict[str, Any] = {
        "operationId": route.name,
        "summary": _first_paragraph(route.view),
        "parameters": [*_path_parameters(route), *(_parameter(one) for one in route.query)],
        "responses": {
            str(route.status): _content("Done." if route.status == 200 else "It goes on in the background.", answer),
            **{code: _content(words, _ref("Error")) for code, words in ERRORS.items()},
        },
    }
    if route.needs:
        found["description"] = f"Needs {route.needs}."
    if route.method != "GET":
        required = [one.name for one in route.body if one.required]
        body = _object({one.name: {**one.kind.schema, "description": str(one.help)} for one in route.body}, required)
        found["requestBody"] = {"content": {"application/json": {"schema": body}}, "required": bool(required)}
    return found


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": SIMPLE[int if kind == "int" else str]}
        for kind, name in PATH_PART.findall(route.path)
    ]


def _parameter(one: Field) -> dict[str, Any]:
    return {
        "name": one.name,
        "in": "query",
        "description": str(one.help),
        "required": one.required,
        "schema": dict(one.kind.schema),
    }


def _task_schema(names: Sequence[str], optional: Sequence[str] = (), *, page: bool = False) -> JsonSchema:
    """Return the schema of a task's document, from the table of columns; ``page``: with what its page adds."""
    properties: dict[str, JsonSchema] = {name: _column_schema(name) for name in (*names, *optional)}
    properties["message"] = {"type": "string", "description": "the result or error in one line, secrets masked"}
    required = [*names, "message"]
    if page:
        properties["explanation"] = _ref(Explanation.__name__)
        properties["attempts"] = {"type": "array", "items": _ref(AttemptDocument.__name__)}
        required += ["explanation", "attempts"]
    return _object(properties, required)


def _column_schema(name: str) -> JsonSchema:
    kind = BY_NAME[name].type
    if kind == "jsonb":
        return {}
    found = SIMPLE[int if kind in INTEGER_TYPES else datetime if kind == "timestamptz" else str]
    return {"anyOf": [found, SIMPLE[NoneType]]} if Task._meta.get_field(name).null else found


def _object(properties: Mapping[str, JsonSchema], required: Sequence[str], **more: str) -> JsonSchema:
    return {"type": "object", **more, "properties": properties, "required": required, "additionalProperties": False}


def _content(words: str, schema: JsonSchema) -> dict[str, Any]:
    return {"description": words, "content": {"application/json": {"schema": schema}}}


def _ref(name: str) -> JsonSchema:
    return {"$ref": f"#/components/schemas/{name}"}


def _first_paragraph(thing: Any) -> str:
    return " ".join((thing.__doc__ or "").partition("\n\n")[0].split())
