"""``taskqueue shards``: how a queue's tasks lie on its databases, and their move from one to another."""

from __future__ import annotations

from django.core.management.base import CommandParser

from django_dbtaskqueue.flow.shard_move import Moved, ShardMove
from django_dbtaskqueue.management.changes import Options
from django_dbtaskqueue.management.output import Output
from django_dbtaskqueue.operations.permissions import Actor
from django_dbtaskqueue.operations.shards import MOVE_SHARD, move_shards, shard_documents

MAX_IDS_PER_REASON = 10  # that the text names


def add_arguments(one: CommandParser) -> None:
    """Add the arguments of the subcommand."""
    one.add_argument("what", choices=("show", "move"))
    one.add_argument("queue")
    text = "Move from this database, such as one that is not a shard any more. Repeat it for more. Default: all shards."
    one.add_argument("--from", action="append", default=[], dest="sources", metavar="ALIAS", help=text)
    text = "Move to this database. Default: to where an enqueue of the same task would put it now."
    one.add_argument("--to", metavar="ALIAS", help=text)
    text = "Move groups also to where they have tasks already. Those that come run after them."
    one.add_argument("--behind", action="store_true", help=text)
    one.add_argument("--reason", default="", help="Why, for the audit.")


def run(output: Output, options: Options) -> int:
    """Show the tasks of a queue on each of its databases, or move those that wait."""
    queue, sources = options["queue"], options["sources"]
    if options["what"] == "show":
        return _shown(output, queue, sources)
    move = ShardMove(queue, options["to"], behind=options["behind"])
    if not output.ask(f"{MOVE_SHARD.effect} Move?"):
        return 0
    report = move_shards(move, Actor(), sources=sources, limit=options["limit"], reason=options["reason"])
    number = sum(report.moved.values())
    moved = [{"from": source, "to": target, "tasks": count} for (source, target), count in report.moved.items()]
    output.data({"moved": moved, "refused": report.refused})
    output.write(f"{MOVE_SHARD.done % {'number': number}}.")
    _write_report(output, report)
    return 0


def _write_report(output: Output, report: Moved) -> None:
    for (source, target), number in report.moved.items():
        output.write(f"{number:,} from {source} to {target}")
    for reason, names in report.refused.items():
        more = ", …" if len(names) > MAX_IDS_PER_REASON else ""
        output.write(f"{len(names):,} stay: {reason}: {', '.join(names[:MAX_IDS_PER_REASON])}{more}")


def _shown(output: Output, queue: str, also: list[str]) -> int:
    documents = shard_documents(queue, Actor(), also)
    output.data(documents)
    numbers = (*documents[0]["statuses"], "moving")
    rows = [
        (one["database"], "yes" if one["is_shard"] else "no", *one["statuses"].values(), one["moving"])
        for one in documents
    ]
    output.table(("database", "polled", *numbers), rows, right=numbers)
    return 0
