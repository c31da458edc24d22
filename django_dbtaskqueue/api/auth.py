"""The door of the JSON API: closed by default, a session with CSRF or a token, JSON in and out, errors that teach."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import wraps
from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.decorators import login_not_required
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.utils.crypto import constant_time_compare
from django.views.decorators.csrf import csrf_exempt, csrf_protect

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.exceptions import SearchTooSlow, TaskQueueError, near_match
from django_dbtaskqueue.operations.permissions import Actor

SCHEME = "Bearer "
View = Callable[..., dict[str, Any]]
Entry = Callable[..., HttpResponseBase]


class Fault(Exception):
    """A request that cannot be answered, with its HTTP status."""

    def __init__(self, status: int, words: str) -> None:
        self.code = status
        super().__init__(words)


def endpoint(method: str, *, created: bool = False) -> Callable[[View], Entry]:
    """Make a view of ``function(request, actor, **place) -> JSON``.

    404 while ``DBTASKQUEUE["API"]`` is not True. A request with a token is its user's, whatever cookies it brings; any
    other is its session's, and then CSRF is checked like everywhere. ``created``: the answer has status 202.
    """

    def decorate(view: View) -> Entry:
        def answer(request: HttpRequest, **place: Any) -> HttpResponse:
            user = getattr(request, "user", None)
            if request.method != method:
                return _fault(405, f"Use {method}.", Allow=method)
            if user is None or not user.is_authenticated:
                return _fault(401, "Log in, or send a token: Authorization: Bearer …", **{"WWW-Authenticate": "Bearer"})
            return _answered(lambda: view(request, Actor(user, "api"), **place), created=created)

        protected = csrf_protect(answer)

        # Exempt from the middlewares only: without a token the same checks are made here.
        @csrf_exempt
        @login_not_required
        @wraps(view)
        def entry(request: HttpRequest, **place: Any) -> HttpResponseBase:
            if not conf.settings().api:
                raise Http404('DBTASKQUEUE["API"] is not True.')
            token = request.headers.get("Authorization", "")
            if not token.startswith(SCHEME):
                return protected(request, **place)
            request.user = _user_of(token.removeprefix(SCHEME).strip())
            return answer(request, **place)

        return entry

    return decorate


def body(request: HttpRequest, *allowed: str) -> dict[str, Any]:
    """Return the JSON object of a request; raise ``Fault`` for anything else, and for a key that is not allowed."""
    try:
        given = json.loads(request.body or b"{}")
    except ValueError as error:
        raise Fault(400, f"The body is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise Fault(400, f"The body must be a JSON object, not {type(given).__name__}.")
    for key in given:
        if key not in allowed:
            raise Fault(400, f"There is no key {key!r} here.{near_match(key, allowed)} Known are {', '.join(allowed)}.")
    return given


def typed(given: dict[str, Any], key: str, kind: type, default: Any) -> Any:
    """Return a value of the body, or ``Fault`` when it is of another type."""
    value = given.get(key, default)
    if value is not default and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise Fault(400, f"{key!r} must be of type {kind.__name__}, not {value!r}.")
    return value


def _answered(ask: Callable[[], dict[str, Any]], *, created: bool) -> HttpResponse:
    try:
        return _json(ask(), 202 if created else 200)
    except Fault as error:
        return _fault(error.code, str(error))
    except SearchTooSlow as error:
        return _fault(503, str(error), **{"Retry-After": "10"})
    except PermissionDenied as error:
        return _fault(403, str(error))
    except Http404 as error:
        return _fault(404, str(error))
    except (TaskQueueError, ImproperlyConfigured) as error:
        return _fault(400, str(error))


def _json(document: dict[str, Any], status: int) -> HttpResponse:
    response = JsonResponse(document, status=status, json_dumps_params={"ensure_ascii": False})
    response["Cache-Control"] = "no-store"
    return response


def _fault(status: int, words: str, **headers: str) -> HttpResponse:
    response = _json({"error": words}, status)
    for name, value in headers.items():
        response[name] = value
    return response


def _user_of(token: str) -> Any:
    """Return the active user a token belongs to, or None. Only hashes are compared, and all of them."""
    digest = hashlib.sha256(token.encode(errors="replace")).hexdigest()
    found = [name for name, known in conf.settings().api_tokens.items() if constant_time_compare(known, digest)]
    if not found:
        return None
    users: Any = get_user_model()
    return users._default_manager.filter(**{users.USERNAME_FIELD: found[0], "is_active": True}).first()
