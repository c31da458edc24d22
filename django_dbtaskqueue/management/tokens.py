"""``taskqueue token`` and ``taskqueue tokens``: make, list and end the tokens of the JSON API."""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import CommandError
from django.db.models.functions import Now

from django_dbtaskqueue.db.session import alias_for
from django_dbtaskqueue.management.output import Output, ago
from django_dbtaskqueue.models import ApiToken
from django_dbtaskqueue.operations.permissions import Actor
from django_dbtaskqueue.operations.visibility import check_there

MAX_LISTED_TOKENS = 500


def make(output: Output, options: dict[str, Any]) -> int:
    """Make a token for the JSON API. It is shown once; the database keeps only its hash."""
    user, queues, life = options["user"], options["queue"], options["expires"]
    users = get_user_model()
    owner = users._default_manager.filter(**{users.USERNAME_FIELD: user}).first()
    if owner is None:
        raise CommandError(f"There is no user {user!r}. Make it first: a token has the permissions of its user.")
    check_there(queues, Actor())
    secret = secrets.token_urlsafe(32)
    digest = hashlib.sha256(secret.encode()).hexdigest()
    end = None if life is None else Now() + life
    row = ApiToken.objects.using(alias_for("", options["database"])).create(
        user=user, actor_id=owner.pk, digest=digest, note=options["note"][:200], scope=options["scope"],
        queues=queues, expire_time=end,
    )  # fmt: skip
    row.refresh_from_db()
    output.data({"number": row.pk, "token": secret, "hash": digest, **_facts(row)})
    output.write(f"Send this with each request, and store it nowhere else:  Authorization: Bearer {secret}")
    until = f"until {row.expire_time:%Y-%m-%d %H:%M %Z}" if row.expire_time else "until it is revoked"
    where = f"on {', '.join(queues)}" if queues else "on every queue"
    output.write(f"Token {row.pk} may {row.scope} as {user} {where}, {until}.")
    return 0


def show(output: Output, options: dict[str, Any]) -> int:
    """List the tokens of the JSON API, or end one."""
    tokens = ApiToken.objects.using(alias_for("", options["database"]))
    if number := options["revoke"]:
        if not tokens.filter(pk=number).delete()[0]:
            raise CommandError(f"There is no token {number}; taskqueue tokens lists them.")
        output.data({"revoked": number})
        output.write(f"Token {number} is refused from now on.")
        return 0
    rows = list(tokens.annotate(clock=Now()).order_by("pk")[:MAX_LISTED_TOKENS])
    output.data([{"number": row.pk, **_facts(row)} for row in rows])
    if not rows:
        output.write("There is no token. taskqueue token USER makes one.")
        return 0
    head = ("number", "user", "scope", "queues", "expires", "last used", "note")
    output.table(head, [_row(row) for row in rows], right=("number",))
    return 0


def _facts(row: ApiToken) -> dict[str, object]:
    facts = {"user": row.user, "scope": row.scope, "queues": row.queue_names, "note": row.note}
    return facts | {"created": row.create_time, "expires": row.expire_time, "last_used": row.last_used_time}


def _row(row: Any) -> tuple[object, ...]:
    times = [ago(time, row.clock) for time in (row.expire_time, row.last_used_time)]
    return (row.pk, row.user, row.scope, ", ".join(row.queue_names) or "all", *times, row.note)
