"""Who may do what: one question, asked by every face before it acts."""

from __future__ import annotations

from typing import Any

from django_dbtaskqueue.operations.verbs import Verb

APP = "dbtaskqueue"


def permission_name(verb: Verb) -> str:
    """Return the Django permission a verb needs, as ``user.has_perm`` takes it."""
    return f"{APP}.{verb.permission}"


def can_operate(user: Any, verb: Verb) -> bool:
    """Whether ``user`` is active and has the verb's own permission. No permission implies another."""
    return bool(user.has_perm(permission_name(verb)))
