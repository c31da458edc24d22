"""``taskqueue reprocess`` and the other verbs, ``pause``, ``resume``, ``purge``, ``bulk``: the acts of every face."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.core.management.base import CommandError
from django.db.models.functions import Now
from django.utils import timezone

from django_dbtaskqueue.db.session import alias_for
from django_dbtaskqueue.management.console.output import Screen, ago, facts, printable
from django_dbtaskqueue.models import BulkOperation
from django_dbtaskqueue.models.operations import FAILED, UNFINISHED
from django_dbtaskqueue.operations import bulk as bulk_operations
from django_dbtaskqueue.operations import queue_control
from django_dbtaskqueue.operations.actions import MAX_TASKS_PER_ACTION, ActionRequest, Report, act, act_on_ids, preview
from django_dbtaskqueue.operations.permissions import Actor
from django_dbtaskqueue.operations.search.parse import of_queue, parse, to_text
from django_dbtaskqueue.operations.search.query import select, tasks_for
from django_dbtaskqueue.operations.serializers import operation_document
from django_dbtaskqueue.operations.verbs import BULK_VERBS, PAUSE, RESUME, HousekeepOptions

FAILED_CODE = 1
Ask = Callable[[str], bool]


def verb(screen: Screen, options: dict[str, Any], ask: Ask) -> int:
    """A verb over ids or a search: what would happen, the question, the act, and what came of it."""
    name, housekeep = options["verb"], _housekeep_options(options)
    words = " ".join(options["filter"])
    if bool(words) == bool(options["id"]):
        raise CommandError("Say on which tasks: --filter SEARCH (such as 'status:ERROR queue:claims'), or --id N.")
    return (
        _on_ids(screen, options, housekeep, ask)
        if options["id"]
        else _on_search(screen, options, words, name, housekeep, ask)
    )


def purge(screen: Screen, options: dict[str, Any], ask: Ask) -> int:
    """Every task of a queue."""
    return _on_search(screen, options, to_text(of_queue(options["queue"])), "purge", HousekeepOptions(), ask)


def pause(screen: Screen, options: dict[str, Any], ask: Ask) -> int:
    """Pause queues."""
    span: timedelta | None = options["for_time"]
    until = None if span is None else timezone.now() + span
    if options["dry_run"]:
        return _said(screen, {"would_pause": options["queue"]}, f"Would pause {', '.join(options['queue'])}.")
    number = queue_control.pause_queues(
        options["queue"], Actor(), reason=options["reason"], until=until, using=options["database"]
    )
    end = f" until {until:%Y-%m-%d %H:%M:%S %Z}" if until else ""
    return _said(screen, {"paused": number}, f"{PAUSE.done % {'number': number}}{end}.")


def resume(screen: Screen, options: dict[str, Any], ask: Ask) -> int:
    """Resume queues."""
    if options["dry_run"]:
        return _said(screen, {"would_resume": options["queue"]}, f"Would resume {', '.join(options['queue'])}.")
    number = queue_control.resume_queues(options["queue"], Actor(), reason=options["reason"], using=options["database"])
    return _said(screen, {"resumed": number}, f"{RESUME.done % {'number': number}}.")


# -- bulk operations ---------------------------------------------------------------------------------------------------


def bulk(screen: Screen, options: dict[str, Any], ask: Ask) -> int:
    """``bulk list``, ``bulk show N``, ``bulk cancel N``, ``bulk run``."""
    alias = alias_for("", options["database"])
    what, number = options["what"], options["number"]
    if what in ("show", "cancel") and number is None:
        raise CommandError(f"Say which: taskqueue bulk {what} N, with a number from taskqueue bulk list.")
    if what == "list":
        return _listed(screen, alias, options["limit"] or 20)
    if what == "run":
        return _run_all(screen, alias)
    operation = BulkOperation.objects.using(alias).filter(pk=number).first()
    if operation is None:
        raise CommandError(f"There is no bulk operation {number}. See taskqueue bulk list.")
    if what == "cancel" and not bulk_operations.cancel(operation.pk, None, options["reason"], alias, source="command"):
        return _said(
            screen, operation_document(operation), f"Bulk operation {number} had ended: {operation.state}.", FAILED_CODE
        )
    operation.refresh_from_db()
    screen.data(operation_document(operation))
    facts(screen, {**operation_document(operation), "skips": None})
    for reason, count in operation.skips.items():
        screen.say(f"skipped {count}: {printable(reason)}")
    return 0


def _run_all(screen: Screen, alias: str) -> int:
    turns = 0
    while bulk_operations.turn(alias):
        turns += 1
    left = BulkOperation.objects.using(alias).filter(state__in=UNFINISHED).count()
    return _said(screen, {"chunks": turns, "unfinished": left}, f"{turns} chunks done, {left} operations unfinished.")


def _listed(screen: Screen, alias: str, limit: int) -> int:
    rows: list[Any] = list(BulkOperation.objects.using(alias).annotate(clock=Now()).order_by("-pk")[:limit])
    screen.data([operation_document(row) for row in rows])
    if not rows:
        screen.say("No bulk operation was ever ordered.")
        return 0
    head = ("id", "state", "done", "changed", "skipped", "ordered", "verb", "search")
    table = [
        (r.pk, r.state, f"{r.progress:.0%}", r.changed, r.skipped, ago(r.create_time, r.clock), r.verb, r.query)
        for r in rows
    ]
    screen.table(head, table, right=("id", "done", "changed", "skipped", "ordered"))
    return 0


# -- acts on tasks -----------------------------------------------------------------------------------------------------


def _on_ids(screen: Screen, options: dict[str, Any], housekeep: HousekeepOptions, ask: Ask) -> int:
    ids, chosen = sorted(set(options["id"])), BULK_VERBS[options["verb"]]
    tasks = tasks_for(parse(""), options["database"], write=True)
    request = ActionRequest(chosen, options["reason"], housekeep)
    seen = preview(tasks.filter(pk__in=ids), request)
    screen.say(str(chosen.effect))
    screen.say(f"{seen.selected} of {len(ids)} tasks are there, {seen.eligible} would change.")
    if options["dry_run"]:
        screen.data({"dry_run": True, "selected": str(seen.selected), "would_change": str(seen.eligible)})
        return 0
    if not ask(f"{chosen.label} {seen.eligible} tasks?"):
        return _said(screen, {"changed": 0}, "Nothing was changed.", FAILED_CODE)
    return _told(screen, chosen, act_on_ids(tasks.model, tasks.db, ids, request, Actor()))


def _on_search(
    screen: Screen, options: dict[str, Any], words: str, name: str, housekeep: HousekeepOptions, ask: Ask
) -> int:
    seen = bulk_operations.preview(name, words, options["database"], options=housekeep)
    for sentence in seen.sentences:
        screen.say(sentence)
    if options["dry_run"]:
        counts = {"selected": seen.selected, "would_change": seen.eligible}
        told = {key: None if count is None else str(count) for key, count in counts.items()}
        screen.data({"dry_run": True, "query": seen.request.query, **told, "estimate": seen.estimate})
        return 0
    chosen = seen.request.verb
    if not ask(f"{chosen.label} {'all that match' if seen.eligible is None else f'{seen.eligible} tasks'}?"):
        return _said(screen, {"changed": 0}, "Nothing was changed.", FAILED_CODE)
    few = seen.selected is not None and not seen.selected.more and seen.selected.number <= MAX_TASKS_PER_ACTION
    if few and not options["background"] and not options["limit"]:
        search = parse(words)
        tasks = select(search, tasks_for(search, options["database"], write=True))
        order = ActionRequest(chosen, options["reason"], housekeep, seen.request.query)
        return _told(screen, chosen, act(tasks, order, Actor()))
    operation = bulk_operations.start(
        name,
        words,
        None,
        options["reason"],
        options["database"],
        source="command",
        options=housekeep,
        max_tasks=options["limit"],
    )
    screen.say(f"Bulk operation {operation.pk} ordered; to stop it: taskqueue bulk cancel {operation.pk}")
    return _ordered(screen, operation) if options["background"] else _followed(screen, operation)


def _ordered(screen: Screen, operation: BulkOperation) -> int:
    return _said(screen, operation_document(operation), "Pollers carry it out; or taskqueue bulk run.")


def _followed(screen: Screen, operation: BulkOperation) -> int:
    """Carry it out here, beside the pollers, to its end."""
    alias, told = str(operation._state.db), 0
    while operation.state in UNFINISHED:
        worked = bulk_operations.turn(alias)
        operation.refresh_from_db()
        if int(operation.progress * 10) > told:
            told = int(operation.progress * 10)
            screen.say(f"{operation.progress:4.0%}  {operation.changed:,} changed, {operation.skipped:,} skipped")
        if not worked and operation.state in UNFINISHED:
            return _ordered(screen, operation)  # a poller is at it
    screen.data(operation_document(operation))
    _skips(screen, operation.skips)
    done = BULK_VERBS[operation.verb].done % {"number": operation.changed}
    screen.say(f"{done}. {operation.note}".strip())
    return FAILED_CODE if operation.state == FAILED else 0


def _told(screen: Screen, chosen: Any, report: Report) -> int:
    skips = {reason: len(ids) for reason, ids in report.skips.items()}
    screen.data({"changed": report.changed, "skipped": report.skipped, "skips": skips})
    _skips(screen, skips)
    screen.say(f"{chosen.done % {'number': report.changed}}.")
    return 0


def _skips(screen: Screen, skips: dict[str, int]) -> None:
    for reason, count in skips.items():
        screen.say(f"skipped {count:,}: {printable(reason)}")


def _said(screen: Screen, data: dict[str, Any], words: str, code: int = 0) -> int:
    screen.data(data)
    screen.say(words)
    return code


def _housekeep_options(options: dict[str, Any]) -> HousekeepOptions:
    return (
        HousekeepOptions(options["older_than"], options["to"]) if options["verb"] == "housekeep" else HousekeepOptions()
    )
