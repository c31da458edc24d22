"""Who may do what: one question, asked by every face before it acts.

Each verb has a permission of its own, and none implies another. A project narrows it per queue with
``DBTASKQUEUE["CAN_OPERATE"]``: the dotted path of ``(user, verb name, queue) -> bool``, asked only about what the
user's permissions allow.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string
from django.utils.translation import gettext as _

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.operations.search.parse import Search, reads_payload
from django_dbtaskqueue.operations.verbs import VERBS, VIEW_PAYLOAD, Verb

APP = "dbtaskqueue"


def permission_name(verb: Verb | str) -> str:
    """Return the Django permission a verb needs, as ``user.has_perm`` takes it."""
    return f"{APP}.{_verb(verb).permission}"


def can_operate(user: Any, verb: Verb | str, queue: str | None = None) -> bool:
    """Whether ``user`` is active, has the verb's own permission, and the project's rule allows it on ``queue``.

    Without a queue: whether on any queue at all, as far as permissions say. An act then asks again for each queue.
    """
    verb = _verb(verb)
    if not user.has_perm(permission_name(verb)):
        return False
    path = conf.settings().can_operate
    return path is None or queue is None or bool(_rule(path)(user, verb.name, queue))


def search_fault(user: Any, search: Search) -> str:
    """Return why ``user`` may not ask for this search, or nothing: what it finds can tell what stands in payloads.

    Such a search needs ``view_payload`` in each queue that it names; when it names none, in all that are known. The
    command line (None) may search for everything.
    """
    if user is None or not reads_payload(search):
        return ""
    if not can_operate(user, VIEW_PAYLOAD):
        return _("Searching in payloads, results and errors needs the permission to see them.")
    if all(can_operate(user, VIEW_PAYLOAD, queue) for queue in search.queues() or conf.known_queues()):
        return ""
    return _("You may not see the payloads of all queues this search looks in. Name one where you may: queue:NAME.")


def denied_queues(user: Any, verb: Verb | str, queues: Iterable[str]) -> set[str]:
    """Return those of ``queues`` that ``user`` may not use the verb on."""
    return {queue for queue in set(queues) if not can_operate(user, verb, queue)}


def _verb(verb: Verb | str) -> Verb:
    return VERBS[verb] if isinstance(verb, str) else verb


def _rule(path: str) -> Any:
    try:
        rule = import_string(path)
    except ImportError as error:
        raise ImproperlyConfigured(f'DBTASKQUEUE["CAN_OPERATE"]={path!r} cannot be imported: {error}') from None
    if not callable(rule):
        raise ImproperlyConfigured(f'DBTASKQUEUE["CAN_OPERATE"]={path!r} is not callable: (user, verb, queue) -> bool.')
    return rule
