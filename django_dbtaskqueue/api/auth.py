"""From a route to a Django view: who calls, what was sent, what is answered. Off by default.

A caller has a session, with CSRF, or a token. JSON in and out, errors included.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import wraps
from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.decorators import login_not_required
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db import InterfaceError, OperationalError
from django.db.models import Q
from django.db.models.functions import Now
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.utils.crypto import constant_time_compare
from django.views.decorators.csrf import csrf_exempt, csrf_protect

from django_dbtaskqueue.api.routing import Call, Route
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.exceptions import SearchTooSlow, TaskQueueError, UnknownQueue
from django_dbtaskqueue.db import standby
from django_dbtaskqueue.db.session import alias_for, migrated
from django_dbtaskqueue.models import ApiToken
from django_dbtaskqueue.models.operations import OPERATE_SCOPE
from django_dbtaskqueue.operations.bounds import BadInput, is_storable
from django_dbtaskqueue.operations.permissions import Actor, Scope
from django_dbtaskqueue.operations.serializers import DocumentEncoder

logger = logging.getLogger("django_dbtaskqueue")

READ_FROM_HEADER = "X-Read-From"
AUTH_SCHEME = "Bearer "
API_SOURCE = "api"
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
            if isinstance(part, str) and not is_storable(part):
                raise BadInput(name, "has a NUL character or half of a surrogate pair; leave it out.")
        call = Call(request, actor, route.read(request))

        def get_reply() -> HttpResponse:
            where = standby.where_read()  # empty, unless a standby was asked first
            return reply(route.answer(call, parts), route.status, **({READ_FROM_HEADER: where} if where else {}))

        return standby.read(get_reply) if route.method == "GET" else get_reply()

    return opened(wraps(route.view)(identified(answer)))


def identified(answer: Answerer) -> Entry:
    """Return a view that knows its caller; None is nobody.

    With a token the request acts for the token's user, and cookies are ignored. Without one it acts for the session's
    user, and CSRF is checked.
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
    return JsonResponse(document, DocumentEncoder, safe=False, json_dumps_params=form, status=status, headers=headers)


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


# -- tokens ------------------------------------------------------------------------------------------------------------


def actor_of(token: str) -> Actor | None:
    """Return whom a token stands for, or None for an unknown or an expired one, or one of an inactive user."""
    digest = hashlib.sha256(token.encode(errors="replace")).hexdigest()
    # All are compared, so that the time tells nothing.
    found = [name for name, known in conf.settings().api_tokens.items() if constant_time_compare(known, digest)]
    if found:
        return _actor(found[0], Scope())
    tokens: Any = ApiToken.objects.using(alias_for("", None))
    live = tokens.filter(Q(expire_time__isnull=True) | Q(expire_time__gt=Now()), digest=digest)
    row = live.annotate(clock=Now()).first()
    if row is None:
        return None
    if row.last_used_time is None or row.clock - row.last_used_time >= LAST_USE_PRECISION:
        tokens.filter(pk=row.pk).update(last_used_time=Now())
    actor = _actor(row.user, Scope(row.scope == OPERATE_SCOPE, row.queue_names))
    return actor if actor and actor.key == row.actor_id else None  # another user has got the name since


def _actor(name: str, scope: Scope) -> Actor | None:
    users: Any = get_user_model()
    user = users._default_manager.filter(**{users.USERNAME_FIELD: name, "is_active": True}).first()
    return None if user is None else Actor(user, API_SOURCE, scope)
