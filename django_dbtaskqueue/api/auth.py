"""Authentication and errors of the JSON API: off by default; a session with CSRF, or a token; JSON in and out."""

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
from django_dbtaskqueue.db.session import migrated
from django_dbtaskqueue.operations.permissions import Actor

AUTH_SCHEME = "Bearer "
JsonObject = dict[str, Any]
View = Callable[..., JsonObject]
Entry = Callable[..., HttpResponseBase]


class ApiError(Exception):
    """The error of a request, with its HTTP status."""

    def __init__(self, code: int, message: str) -> None:
        self.code = code
        super().__init__(message)


def endpoint(method: str, *, created: bool = False) -> Callable[[View], Entry]:
    """Make a view of ``function(request, actor, **arguments) -> JSON``.

    It answers 404 while ``DBTASKQUEUE["API"]`` is not True. With a token the request acts for the token's user, and
    cookies are ignored. Without one it acts for the session's user, and CSRF is checked. ``created``: status 202.
    """

    def decorate(view: View) -> Entry:
        def answer(request: HttpRequest, **arguments: Any) -> HttpResponse:
            user = getattr(request, "user", None)
            if request.method != method:
                return _error(405, f"Use {method}.", Allow=method)
            if user is None or not user.is_authenticated:
                return _error(401, "Log in, or send a token: Authorization: Bearer …", **{"WWW-Authenticate": "Bearer"})
            return _answer(lambda: view(request, Actor(user, "api"), **arguments), created=created)

        protected = csrf_protect(answer)

        # The middlewares skip this view; without a token it makes the same checks itself.
        @csrf_exempt
        @login_not_required
        @wraps(view)
        def entry(request: HttpRequest, **arguments: Any) -> HttpResponseBase:
            if not conf.settings().api:
                raise Http404('DBTASKQUEUE["API"] is not True.')
            token = request.headers.get("Authorization", "")
            if not token.startswith(AUTH_SCHEME):
                return protected(request, **arguments)
            request.user = _user_of(token.removeprefix(AUTH_SCHEME).strip())
            return answer(request, **arguments)

        return entry

    return decorate


def body(request: HttpRequest, *allowed: str) -> JsonObject:
    """Return the JSON object of a request; raise ``ApiError`` for anything else, and for a key that is not allowed."""
    try:
        given = json.loads(request.body or b"{}")
    except ValueError as error:
        raise ApiError(400, f"The body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ApiError(400, f"The body must be a JSON object, not {type(given).__name__}.")
    for key in given:
        if key not in allowed:
            known = f"{near_match(key, allowed)} Known are {', '.join(allowed)}."
            raise ApiError(400, f"There is no key {key!r} here.{known}")
    return given


def typed(given: JsonObject, key: str, kind: type, default: Any) -> Any:
    """Return a value of the body, or ``ApiError`` when it is of another type."""
    value = given.get(key, default)
    if value is not default and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise ApiError(400, f"{key!r} must be of type {kind.__name__}, not {value!r}.")
    return value


def _answer(get_document: Callable[[], JsonObject], *, created: bool) -> HttpResponse:
    try:
        with migrated():
            return _json(get_document(), 202 if created else 200)
    except ApiError as error:
        return _error(error.code, str(error))
    except SearchTooSlow as error:
        return _error(503, str(error), **{"Retry-After": "10"})
    except PermissionDenied as error:
        return _error(403, str(error))
    except Http404 as error:
        return _error(404, str(error))
    except (TaskQueueError, ImproperlyConfigured) as error:
        return _error(400, str(error))


def _json(document: JsonObject, status: int, **headers: str) -> HttpResponse:
    headers["Cache-Control"] = "no-store"
    return JsonResponse(document, status=status, json_dumps_params={"ensure_ascii": False}, headers=headers)


def _error(status: int, message: str, **headers: str) -> HttpResponse:
    return _json({"error": message}, status, **headers)


def _user_of(token: str) -> Any:
    """Return the active user of a token, or None. Compares hashes, and always all of them."""
    digest = hashlib.sha256(token.encode(errors="replace")).hexdigest()
    found = [name for name, known in conf.settings().api_tokens.items() if constant_time_compare(known, digest)]
    if not found:
        return None
    users: Any = get_user_model()
    return users._default_manager.filter(**{users.USERNAME_FIELD: found[0], "is_active": True}).first()
