"""``taskqueue batches``: list batches and show one, cancel all of its tasks, or retry those that failed."""

from __future__ import annotations

from django.core.management.base import CommandError, CommandParser

from django_dbtaskqueue.management.changes import Options
from django_dbtaskqueue.management.output import Output
from django_dbtaskqueue.operations.batch_control import (
    BATCH_VERBS,
    BatchDocument,
    act_on_batch,
    batch_documents,
    find_batch,
    listed,
)
from django_dbtaskqueue.operations.permissions import Actor

BATCH_WORDS = {name.removesuffix("_batch"): verb for name, verb in BATCH_VERBS.items()}
ID_MISSING_CODE = 2  # exit code: wrong usage


def add_arguments(one: CommandParser) -> None:
    """Add the arguments of the subcommand."""
    one.add_argument("what", nargs="?", default="list", choices=("list", "show", *BATCH_WORDS))
    one.add_argument("id", nargs="?", help="Id of the batch.")
    one.add_argument("--reason", default="", help="Why, for the audit.")


def run(output: Output, options: Options) -> int:
    """List batches or show one; or act, and show what became of it."""
    actor, using, what, pk = Actor(), options["database"], options["what"], options["id"]
    if what == "list":
        documents = batch_documents(listed(actor, using))
        output.data(documents)
        if not documents:
            output.write("There is no batch. The code makes one with batch() or Workflow.")
            return 0
        output.table(("id", "name", "created", "ended", "failed", "queues"), [_line(one) for one in documents])
        return 0
    if not pk:
        raise CommandError(f"Give its id: taskqueue batches {what} ID.", returncode=ID_MISSING_CODE)
    row = find_batch(pk, actor, using)
    if row is None:
        raise CommandError(f"There is no batch {pk!r}. taskqueue batches lists them.")
    if what in BATCH_WORDS:
        changed = act_on_batch(BATCH_WORDS[what], row, actor, reason=options["reason"])
        output.write(f"{BATCH_WORDS[what].done % {'number': changed}}.")
    [document] = batch_documents([row])
    output.data(document)
    output.facts({**document, "queues": ", ".join(document["queues"]), **document["statuses"], "statuses": None})
    return 0


def _line(one: BatchDocument) -> tuple[object, ...]:
    statuses = one["statuses"]
    failed = statuses["ERROR"] + statuses["POISON"]
    ended = f"{statuses['COMPLETED'] + failed:,} of {one['total']:,}"
    return (one["id"], one["name"], one["created"], ended, failed, ", ".join(one["queues"]))
