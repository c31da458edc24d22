"""``taskqueue index``: the index that searches of payloads go by, for those who want to pay for it."""

from __future__ import annotations

from typing import Any

from django.contrib.postgres.indexes import GinIndex
from django.core.management.base import CommandError
from django.db import connections

from django_dbtaskqueue.db.session import alias_for, model_for
from django_dbtaskqueue.management.console.output import Screen


def index(screen: Screen, options: dict[str, Any]) -> int:
    """Make the index, or take it away, without stopping anybody's work. It costs each enqueue, and no checkout."""
    queue = options["queue"] or ""
    model, alias = model_for(queue), alias_for(queue, options["database"])
    connection = connections[alias]
    if connection.vendor != "postgresql":
        raise CommandError(f"Database {alias!r} is no PostgreSQL; only that has an index for what stands in JSON.")
    wanted = GinIndex(fields=["payload"], opclasses=["jsonb_path_ops"], name=f"{model._meta.db_table[:40]}_payload_in")
    with connection.cursor() as cursor:
        found = wanted.name in connection.introspection.get_constraints(cursor, model._meta.db_table)
    if found == (not options["drop"]):
        return _said(screen, wanted.name, "There is nothing to do.")
    with connection.schema_editor(atomic=False) as editor:
        change: Any = editor.remove_index if options["drop"] else editor.add_index
        change(model, wanted, concurrently=True)
    done = "is gone" if options["drop"] else "is there: payload.KEY:VALUE goes by it"
    return _said(screen, wanted.name, f"Index {wanted.name} {done}.")


def _said(screen: Screen, name: str, words: str) -> int:
    screen.data({"index": name, "done": words})
    screen.say(words)
    return 0
