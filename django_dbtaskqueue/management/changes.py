"""``taskqueue reprocess`` and the other verbs, ``pause``, ``set``, ``bulk``, ``schedules``, ``batches`` and so on."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar

from django.contrib.auth import get_user_model
from django.contrib.postgres.indexes import GinIndex
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser
from django.db import connections
from django.db.models import Model, QuerySet
from django.db.models.functions import Now
from django.utils import timezone

from django_dbtaskqueue.conf.queue import setting_text, typed
from django_dbtaskqueue.core.masking import masked, masked_text
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db.session import alias_for, model_for
from django_dbtaskqueue.flow.schedule import SCHEDULE_FIELDS
from django_dbtaskqueue.flow.shard_move import ShardMove
from django_dbtaskqueue.management import Options, Output, ago, printable
from django_dbtaskqueue.models import ApiToken, Attempt, BulkOperation, FailureGroup, Queue, Schedule, TaskHistory
from django_dbtaskqueue.models.control import FAILED, MISSED_POLICIES, OVERLAP_POLICIES, UNFINISHED
from django_dbtaskqueue.operations import bulk as bulk_operations
from django_dbtaskqueue.operations import queue_control, related_tasks, schedules
from django_dbtaskqueue.operations.actions import (
    MAX_TASKS_PER_ACTION,
    ActionRequest,
    ActReport,
    act,
    act_on_ids,
    preview,
)
from django_dbtaskqueue.operations.lookup import locations_on
from django_dbtaskqueue.operations.permissions import CHANGE_SETTINGS, Actor, check_there
from django_dbtaskqueue.operations.schedule_import import OTHER_QUEUES, import_schedules
from django_dbtaskqueue.operations.search import of_queue, parse, to_text
from django_dbtaskqueue.operations.search.query import MAY_HAVE_ERROR, select, tasks_for
from django_dbtaskqueue.operations.serializers import OPERATION, as_document
from django_dbtaskqueue.operations.verbs import ID_VERBS, PUT_BACK, QUEUE_VERBS, VerbOptions, json_of

FAILED_CODE, USAGE_CODE = 1, 2  # exit codes
DEFAULT_BULK_ROWS = 20
MAX_ROWS_MASKED_AT_ONCE = 500
M = TypeVar("M", bound=Model)


def verb(output: Output, options: Options) -> int:
    """Apply a verb to ids or to a search: preview, question, action, report."""
    if bool(options["filter"]) == bool(options["id"]):
        words = "Name the tasks: --filter SEARCH (such as 'status:ERROR queue:claims'), or --id N."
        raise CommandError(words, returncode=USAGE_CODE)
    return _on_ids(output, options) if options["id"] else _on_search(output, options)


def purge(output: Output, options: Options) -> int:
    """Delete every task of a queue, in any status."""
    check_there([options["queue"]], Actor())
    return _on_search(output, {**options, "filter": [to_text(of_queue(options["queue"]))]})


def queue_verb(output: Output, options: Options) -> int:
    """Apply a verb to queues."""
    queues, name = options["queue"], options["verb"]
    if options["dry_run"]:
        return output.answer({"dry_run": True, "queues": queues}, f"Would {name} {', '.join(queues)}.")
    verb, length = QUEUE_VERBS[name], options.get("for_time")
    until = timezone.now() + length if length else None
    number = queue_control.apply_to_queues(
        verb, queues, Actor(), reason=options["reason"], until=until, using=options["database"]
    )
    end = f" until {until:%Y-%m-%d %H:%M:%S %Z}" if until else ""
    return output.answer({"changed": number}, f"{verb.done % {'number': number}}{end}.")


# -- settings of a queue -----------------------------------------------------------------------------------------------


def show_settings(output: Output, options: Options) -> int:
    """Show the settings of a queue: each value, and where it comes from."""
    _settings(output, options["queue"], _overrides(options))
    return 0


def set_settings(output: Output, options: Options) -> int:
    """Set limits and other settings of a queue while pollers run. They follow within a heartbeat."""
    queue, values, reset = options["queue"], {}, [name.lower() for name in options["reset"]]
    for text in options["values"]:
        name, _equals, value = (part.strip() for part in text.partition("="))
        if not name or not value:
            words = f"{text}: write NAME=VALUE, such as max_running=5. To take a setting back: --reset NAME."
            raise CommandError(words, returncode=USAGE_CODE)
        values[name.lower()] = typed(name.lower(), value)
    if not values and not reset:
        words = f"Say what to set: taskqueue set {queue} NAME=VALUE. taskqueue settings {queue} shows all settings."
        raise CommandError(words, returncode=USAGE_CODE)
    after, dry, reason = _overrides(options), options["dry_run"], options["reason"]
    try:
        if dry:
            after = queue_control.new_overrides(queue, after, values, reset)
        else:
            after = queue_control.change_settings(
                queue, values, Actor(), reset=reset, reason=reason, using=options["database"]
            )
    except ImproperlyConfigured as error:  # of what was typed, so not the site's fault
        raise CommandError(str(error), returncode=USAGE_CODE) from None
    output.write("Nothing was changed: --dry-run. It would be:" if dry else str(CHANGE_SETTINGS.effect))
    _settings(output, queue, after, [*values, *reset], **({"dry_run": True} if dry else {}))
    return 0


def _overrides(options: Options) -> dict[str, object]:
    """Return what operators set of a queue; raise ``UnknownQueue`` for one that is not there."""
    queue = options["queue"]
    check_there([queue], Actor())
    row = Queue.objects.using(alias_for(queue, options["database"])).filter(pk=queue).first()
    return row.changes if row else {}


def _settings(
    output: Output, queue: str, values: Mapping[str, object], only: Sequence[str] = (), **more: object
) -> None:
    """Write the settings of a queue with ``values``, what operators set, laid over; with ``only`` those named."""
    shown = [one for one in queue_control.settings_in_force(queue, values) if not only or one.name in only]
    plain = [one.value if one.value is None or isinstance(one.value, int) else setting_text(one.value) for one in shown]
    facts = [asdict(replace(one, value=value)) for one, value in zip(shown, plain, strict=True)]
    output.data({**more, "queue": queue, "settings": facts})
    output.table(("setting", "value", "source"), [(one["name"], str(one["value"]), one["source"]) for one in facts])


# -- bulk operations ---------------------------------------------------------------------------------------------------


def bulk(output: Output, options: Options) -> int:
    """List, show, cancel, undo bulk operations, or carry out those that are waiting."""
    alias = alias_for("", options["database"])
    what, number = options["what"], options["number"]
    if what not in ("list", "run") and number is None:
        words = f"Give its number: taskqueue bulk {what} N, with a number from taskqueue bulk list."
        raise CommandError(words, returncode=USAGE_CODE)
    if what == "list":
        return _listed(output, alias, options["limit"] or DEFAULT_BULK_ROWS)
    if what == "run":
        chunks = sum(1 for _ in iter(partial(bulk_operations.turn, alias), False))
        left = BulkOperation.objects.using(alias).filter(state__in=UNFINISHED).count()
        counts = {"chunks": chunks, "unfinished": left}
        return output.answer(counts, f"{chunks} chunks done, {left} operations unfinished.")
    operation = BulkOperation.objects.using(alias).filter(pk=number).first()
    if operation is None:
        raise CommandError(f"There is no bulk operation {number}. See taskqueue bulk list.")
    if what == "put-back":
        back = bulk_operations.put_back(operation.pk, None, options["reason"], alias, source="command")
        output.write(f"{PUT_BACK.effect}\nBulk operation {back.pk} ordered.")
        return _followed(output, back)
    if what == "cancel" and not bulk_operations.cancel(operation.pk, None, options["reason"], alias, source="command"):
        ended = f"Bulk operation {number} has ended already: {operation.state}."
        return output.answer(OPERATION.of(operation), ended, FAILED_CODE)
    operation.refresh_from_db()
    document = OPERATION.of(operation)
    output.data(document)
    output.facts({**document, "skips": None})
    _skips(output, operation.skips)
    return 0


def _listed(output: Output, alias: str, limit: int) -> int:
    rows: list[Any] = list(BulkOperation.objects.using(alias).annotate(clock=Now()).order_by("-pk")[:limit])
    if not rows:
        return output.answer([], "There is no bulk operation.")
    output.data([OPERATION.of(row) for row in rows])
    head = ("id", "state", "done", "changed", "skipped", "ordered", "verb", "search")
    table = [
        (r.pk, r.state, f"{r.progress:.0%}", r.changed, r.skipped, ago(r.create_time, r.clock), r.verb, r.query)
        for r in rows
    ]
    output.table(head, table, right=("id", "done", "changed", "skipped", "ordered"))
    return 0


def index(output: Output, options: Options) -> int:
    """Create the index for searches of payloads (PostgreSQL). It slows enqueue down; reads and writes go on."""
    queue = options["queue"] or ""
    model, alias = model_for(queue), alias_for(queue, options["database"])
    connection = connections[alias]
    if connection.vendor != "postgresql":
        raise CommandError(f"Database {alias!r} is not PostgreSQL. Only PostgreSQL has an index on JSON payloads.")
    gin = GinIndex(fields=["payload"], opclasses=["jsonb_path_ops"], name=f"{model._meta.db_table[:40]}_payload_in")
    with connection.cursor() as cursor:
        exists = gin.name in connection.introspection.get_constraints(cursor, model._meta.db_table)
    done = "There is nothing to do."
    if exists == bool(options["drop"]):
        with connection.schema_editor(atomic=False) as editor:
            change: Any = editor.remove_index if options["drop"] else editor.add_index
            change(model, gin, concurrently=True)
        done = f"Index {gin.name} {'dropped' if exists else 'created: searches for payload.KEY:VALUE use it'}."
    return output.answer({"index": gin.name, "done": done}, done)


def mask(output: Output, options: Options) -> int:
    """Mask secrets in stored texts of failures: written by SQL, or before MASK had the keys."""
    dry_run = options["dry_run"]
    if not dry_run and not output.ask("Replace the secrets in all stored texts of failures, for good?"):
        return output.answer({"masked": 0}, "Nothing was changed.", FAILED_CODE)
    changed = 0
    for alias, model in (places := locations_on(options["database"])):
        tasks = model._base_manager.using(alias).filter(MAY_HAVE_ERROR, process_result__isnull=False)
        changed += _mask_stored(tasks, "process_result", dry_run=dry_run)
    for alias in {alias for alias, _model in places}:
        moved = TaskHistory.objects.using(alias).filter(status__in=[Status.ERROR, Status.POISON])
        changed += _mask_stored(moved, "process_result", dry_run=dry_run)
        changed += _mask_stored(Attempt.objects.using(alias).all(), "message", "traceback", dry_run=dry_run)
        changed += _mask_stored(FailureGroup.objects.using(alias).all(), "message", dry_run=dry_run)
    if dry_run:
        return output.answer({"dry_run": True, "would_mask": changed}, f"{changed} stored texts would be masked.")
    return output.answer({"masked": changed}, f"{changed} stored texts masked.")


def _mask_stored(rows: QuerySet[M], *columns: str, dry_run: bool) -> int:
    """Mask text columns of all rows; return how many rows changed, or would.

    What a poller writes meanwhile is masked already.
    """
    changed, rest = 0, rows.order_by("pk")
    while page := list(rest.values_list("pk", *columns)[:MAX_ROWS_MASKED_AT_ONCE]):
        for pk, *texts in page:
            before = {name: text for name, text in zip(columns, texts, strict=True) if text}
            after = {name: masked_text(text) for name, text in before.items()}
            if after != before:
                changed += 1 if dry_run else rows.filter(pk=pk, **before).update(**after)
        rest = rows.filter(pk__gt=page[-1][0]).order_by("pk")
    return changed


# -- actions on tasks --------------------------------------------------------------------------------------------------


def _on_ids(output: Output, options: Options) -> int:
    ids, chosen = sorted(set(options["id"])), ID_VERBS[options["verb"]]
    tasks = tasks_for(parse(""), options["database"], write=True)
    request = ActionRequest(chosen, options["reason"], _given(options))
    seen = preview(tasks.filter(pk__in=ids), request)
    there = f"{seen.selected} of {len(ids)} {'task is' if len(ids) == 1 else 'tasks are'} there"
    running = f" {seen.running} of them run now." if seen.running else ""
    output.write(f"{chosen.effect}\n{there}, {seen.eligible} would change.{running}")
    if options["dry_run"]:
        output.data({"dry_run": True, **as_document(seen)})
        return 0
    if not output.ask(f"{chosen.label} {seen.eligible} tasks?"):
        return output.answer({"changed": 0}, "Nothing was changed.", FAILED_CODE)
    return _reported(output, chosen, act_on_ids(tasks, ids, request, Actor()))


def _on_search(output: Output, options: Options) -> int:
    words, given = " ".join(options["filter"]), _given(options)
    seen = bulk_operations.preview(options["verb"], words, options["database"], options=given)
    output.write("\n".join(seen.sentences))
    if options["dry_run"]:
        output.data({"dry_run": True, **as_document(seen)})
        return 0
    chosen = seen.request.verb
    if not output.ask(f"{chosen.label} {'all that match' if seen.eligible is None else f'{seen.eligible} tasks'}?"):
        return output.answer({"changed": 0}, "Nothing was changed.", FAILED_CODE)
    at_once = seen.selected is not None and not seen.selected.more and seen.selected.number <= MAX_TASKS_PER_ACTION
    if at_once and not options["background"] and not options["limit"]:
        search = parse(words)
        tasks = select(search, tasks_for(search, options["database"], write=True))
        request = ActionRequest(chosen, options["reason"], given, seen.request.query)
        return _reported(output, chosen, act(tasks, request, Actor()))
    operation = bulk_operations.start(
        chosen, words, None, options["reason"], options["database"],
        source="command", options=given, max_tasks=options["limit"],
    )  # fmt: skip
    output.write(f"Bulk operation {operation.pk} ordered; to stop it: taskqueue bulk cancel {operation.pk}")
    return _ordered(output, operation) if options["background"] else _followed(output, operation)


def _ordered(output: Output, operation: BulkOperation) -> int:
    return output.answer(OPERATION.of(operation), "Pollers carry it out; or taskqueue bulk run.")


def _followed(output: Output, operation: BulkOperation) -> int:
    """Carry the operation out in this process, beside the pollers, to its end."""
    alias, written = str(operation._state.db), 0
    while operation.state in UNFINISHED:
        worked = bulk_operations.turn(alias)
        operation.refresh_from_db()
        if int(operation.progress * 10) > written:
            written = int(operation.progress * 10)
            output.write(f"{operation.progress:4.0%}  {operation.changed:,} changed, {operation.skipped:,} skipped")
        if not worked and operation.state in UNFINISHED:
            return _ordered(output, operation)  # a poller carries it out
    output.data(OPERATION.of(operation))
    _skips(output, operation.skips)
    done = (PUT_BACK if operation.verb == PUT_BACK.name else ID_VERBS[operation.verb]).done % {
        "number": operation.changed
    }
    output.write(f"{done}. {operation.note}".strip())
    return FAILED_CODE if operation.state == FAILED else 0


def _reported(output: Output, chosen: Any, report: ActReport) -> int:
    output.data(report)
    _skips(output, {reason: len(ids) for reason, ids in report.skips.items()})
    output.write(f"{chosen.done % {'number': report.changed}}.")
    return 0


def _skips(output: Output, skips: dict[str, int]) -> None:
    for reason, count in skips.items():
        output.write(f"skipped {count:,}: {printable(reason)}")


def _given(options: Options) -> VerbOptions:
    """Return the options of the verb; ``argparse`` has read and checked each."""
    verb = ID_VERBS[options["verb"]]
    return replace(VerbOptions(), **{one.field: options[one.field] for one in verb.inputs})


# -- shards ------------------------------------------------------------------------------------------------------------

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


def run(output: Output, options: Options) -> int:
    """Show the tasks of a queue on each of its databases, or move those that wait."""
    queue, sources = options["queue"], options["sources"]
    if options["what"] == "show":
        return _shown(output, queue, sources)
    move = ShardMove(queue, options["to"], behind=options["behind"])
    if not output.ask(f"{queue_control.MOVE_SHARD.effect} Move?"):
        return 0
    report = queue_control.move_shards(move, Actor(), sources=sources, limit=options["limit"], reason=options["reason"])
    moved = [{"from": source, "to": target, "tasks": count} for (source, target), count in report.moved.items()]
    lines = [f"{queue_control.MOVE_SHARD.done % {'number': sum(report.moved.values())}}."]
    lines += [f"{number:,} from {source} to {target}" for (source, target), number in report.moved.items()]
    for reason, names in report.refused.items():
        more = ", …" if len(names) > MAX_IDS_PER_REASON else ""
        lines.append(f"{len(names):,} stay: {reason}: {', '.join(names[:MAX_IDS_PER_REASON])}{more}")
    return output.answer({"moved": moved, "refused": report.refused}, "\n".join(lines))


def _shown(output: Output, queue: str, also: list[str]) -> int:
    documents = queue_control.shard_documents(queue, Actor(), also)
    output.data(documents)
    numbers = (*documents[0]["statuses"], "moving")
    rows = [
        (one["database"], "yes" if one["is_shard"] else "no", *one["statuses"].values(), one["moving"])
        for one in documents
    ]
    output.table(("database", "polled", *numbers), rows, right=numbers)
    return 0


# -- tokens ------------------------------------------------------------------------------------------------------------

MAX_LISTED_TOKENS = 500


def make(output: Output, options: Options) -> int:
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
    sent = f"Send this with each request, and store it nowhere else:  Authorization: Bearer {secret}"
    until = f"until {row.expire_time:%Y-%m-%d %H:%M %Z}" if row.expire_time else "until it is revoked"
    where = f"on {', '.join(queues)}" if queues else "on every queue"
    may = f"Token {row.pk} may {row.scope} as {user} {where}, {until}."
    document = {"number": row.pk, "token": secret, "hash": digest, **_facts(row)}
    return output.answer(document, f"{sent}\n{may}")


def show(output: Output, options: Options) -> int:
    """List the tokens of the JSON API, or end one."""
    tokens = ApiToken.objects.using(alias_for("", options["database"]))
    if number := options["revoke"]:
        if not tokens.filter(pk=number).delete()[0]:
            raise CommandError(f"There is no token {number}; taskqueue tokens lists them.")
        return output.answer({"revoked": number}, f"Token {number} is refused from now on.")
    rows = list(tokens.annotate(clock=Now()).order_by("pk")[:MAX_LISTED_TOKENS])
    if not rows:
        return output.answer([], "There is no token. taskqueue token USER makes one.")
    output.data([{"number": row.pk, **_facts(row)} for row in rows])
    head = ("number", "user", "scope", "queues", "expires", "last used", "note")
    output.table(head, [_row(row) for row in rows], right=("number",))
    return 0


def _facts(row: ApiToken) -> dict[str, object]:
    facts = {"user": row.user, "scope": row.scope, "queues": row.queue_names, "note": row.note}
    return facts | {"created": row.create_time, "expires": row.expire_time, "last_used": row.last_used_time}


def _row(row: Any) -> tuple[object, ...]:
    times = [ago(time, row.clock) for time in (row.expire_time, row.last_used_time)]
    return (row.pk, row.user, row.scope, ", ".join(row.queue_names) or "all", *times, row.note)


# -- schedules ---------------------------------------------------------------------------------------------------------

WRITE_WORDS = {"add": schedules.ADD_SCHEDULE, "edit": schedules.EDIT_SCHEDULE}
VERB_WORDS = {name.removesuffix("_schedule"): verb for name, verb in schedules.SCHEDULE_VERBS.items()}
BATCH_WORDS = {name.removesuffix("_batch"): verb for name, verb in related_tasks.BATCH_VERBS.items()}


def add_schedule_arguments(one: CommandParser) -> None:
    """Add the arguments of ``taskqueue schedules``."""
    one.add_argument("what", nargs="?", default="list", choices=("list", "show", "import", *WRITE_WORDS, *VERB_WORDS))
    one.add_argument("name", nargs="?", help="Name of the schedule.")
    one.add_argument(
        "--from", choices=OTHER_QUEUES, dest="source", help="Of import: the queue whose schedules to take over."
    )
    one.add_argument(
        "--queue-of", action="append", default=[], metavar="TASK=QUEUE",
        help="Of import: the queue of a task. Repeat it for more. Default: that of the processor with its dotted path.",
    )  # fmt: skip
    one.add_argument("--dry-run", action="store_true", help="Of import: say what would happen; change nothing.")
    for name, text in (
        ("queue", "Queue of the tasks."),
        ("cron", "Such as '0 7 * * mon-fri': minute hour day month weekday; a sixth in front is the second."),
        ("timezone", "Such as Europe/Madrid. Default: that of the site."),
        ("payload", "Payload of the tasks, as JSON."),
        ("payload-type", "Type of the payload, for a queue with several processors."),
        ("priority", "Priority of the tasks; lower runs first. Default: that of the queue."),
        ("missed", f"What to do with missed ticks: {_choices(MISSED_POLICIES)}."),
        ("overlap", f"While the task before is not finished: {_choices(OVERLAP_POLICIES)}."),
    ):
        one.add_argument(f"--{name}", metavar=name.rpartition("-")[2].upper(), help=text)


def _choices(policies: Iterable[tuple[str, object]]) -> str:
    return "; ".join(f"{word} ({label})" for word, label in policies)


def run_schedules(output: Output, options: Options) -> int:
    """Show schedules in words and with their next times; add, import, edit, pause, resume, run, reset, delete them."""
    actor, using, what, name = Actor(), options["database"], options["what"], options["name"]
    if what == "list":
        return _schedules_listed(output, schedules.listed(actor, using), actor)
    if what == "import":
        return _import(output, options, actor)
    if not name:
        words = f"Give its name: taskqueue schedules {what} NAME, with a name from taskqueue schedules."
        raise CommandError(words, returncode=USAGE_CODE)
    given: Options = {"reason": options["reason"], "using": using}
    if what in WRITE_WORDS:
        write = schedules.add_schedule if what == "add" else schedules.edit_schedule
        row: Schedule | None = write(name, _values(options), actor, **given)
    elif what in VERB_WORDS:
        row = schedules.act_on_schedule(VERB_WORDS[what], name, actor, **given)
    else:
        row = schedules.find(name, actor, using)
    if row is None:
        raise CommandError(f"There is no schedule {name!r}. taskqueue schedules lists them.")
    if what != "show":
        output.write(f"{(WRITE_WORDS | VERB_WORDS)[what].done % {'number': 1}}.")
    document = schedules.schedule_document(row, actor)
    output.data(document)
    times = ", ".join(f"{one:%a %Y-%m-%d %H:%M:%S %Z}" for one in document["next_times"])
    if what not in VERB_WORDS:
        output.facts({**document, "next_times": times, "edited": ", ".join(row.edited)})
    return 0


def _import(output: Output, options: Options, actor: Actor) -> int:
    if not options["source"]:
        raise CommandError(f"Add --from {' or --from '.join(OTHER_QUEUES)}.", returncode=USAGE_CODE)
    pairs = [text.partition("=") for text in options["queue_of"]]
    for (task, equals, queue), text in zip(pairs, options["queue_of"], strict=True):
        if not (task and equals and queue):
            raise CommandError(f"--queue-of {text}: write TASK=QUEUE.", returncode=USAGE_CODE)
    queue_of = {task: queue for task, _equals, queue in pairs}
    found = import_schedules(options["source"], queue_of, actor, dry_run=options["dry_run"])
    output.data(masked([asdict(one) for one in found]))
    rows = []
    for one in found:
        made = one.definition
        words = "; ".join([f"{made.cron} {made.timezone} → {made.queue}", *one.notes]) if made else one.reason
        rows.append((one.name, one.timing, f"{one.result}, paused" if made and one.paused else one.result, words))
    if rows:
        output.table(("name", "there", "result", "here"), rows)
    left = sum(one.definition is None for one in found)
    end = " Nothing was changed: --dry-run." if options["dry_run"] else ""
    output.write(f"{len(found) - left} of {len(found)} schedules can be imported." + end)
    return FAILED_CODE if left else 0


def _values(options: Options) -> Options:
    values = {name: options[name] for name in SCHEDULE_FIELDS if options[name] is not None}
    try:
        if "payload" in values:
            values["payload"] = json_of(values["payload"])
        if "priority" in values:
            values["priority"] = int(values["priority"])
    except ValueError as error:
        raise CommandError(str(error), returncode=USAGE_CODE) from None
    return values


def _schedules_listed(output: Output, rows: list[Schedule], actor: Actor) -> int:
    if not rows:
        return output.answer([], "There is no schedule. Declare one with @periodic, or: taskqueue schedules add NAME …")
    documents = [schedules.schedule_document(row, actor) for row in rows]
    output.data(documents)
    head = ("name", "state", "when", "queue", "next tick", "last tick", "source")
    output.table(head, [_schedule_line(row, one) for row, one in zip(rows, documents, strict=True)])
    return 0


def _schedule_line(row: Schedule, document: schedules.ScheduleDocument) -> tuple[object, ...]:
    state = "paused" if row.paused else "running" if document["declared"] else "code is gone"
    coming = document["next_times"][0] if document["next_times"] else None
    local = (one and (timezone.localtime(one) if one.tzinfo else one) for one in (coming, row.last_time))
    times = [one and f"{one:%Y-%m-%d %H:%M:%S}" for one in local]
    source = f"{row.source}, edited: {', '.join(row.edited)}" if row.edited else row.source
    return (row.name, state, document["words"], row.queue, *times, source)


# -- batches -----------------------------------------------------------------------------------------------------------


def add_batch_arguments(one: CommandParser) -> None:
    """Add the arguments of ``taskqueue batches``."""
    one.add_argument("what", nargs="?", default="list", choices=("list", "show", *BATCH_WORDS))
    one.add_argument("id", nargs="?", help="Id of the batch.")


def run_batches(output: Output, options: Options) -> int:
    """List batches and workflows, show one, cancel all its tasks, or retry those that failed."""
    actor, using, what, pk = Actor(), options["database"], options["what"], options["id"]
    if what == "list":
        documents = related_tasks.batch_documents(related_tasks.listed_batches(actor, using))
        if not documents:
            return output.answer([], "There is no batch. The code makes one with batch() or Workflow.")
        output.data(documents)
        output.table(("id", "name", "created", "ended", "failed", "queues"), [_batch_line(one) for one in documents])
        return 0
    if not pk:
        raise CommandError(f"Give its id: taskqueue batches {what} ID.", returncode=USAGE_CODE)
    row = related_tasks.find_batch(pk, actor, using)
    if row is None:
        raise CommandError(f"There is no batch {pk!r}. taskqueue batches lists them.")
    if what in BATCH_WORDS:
        changed = related_tasks.act_on_batch(BATCH_WORDS[what], row, actor, reason=options["reason"])
        output.write(f"{BATCH_WORDS[what].done % {'number': changed}}.")
    [document] = related_tasks.batch_documents([row])
    output.data(document)
    output.facts({**document, "queues": ", ".join(document["queues"]), **document["statuses"], "statuses": None})
    return 0


def _batch_line(one: related_tasks.BatchDocument) -> tuple[object, ...]:
    statuses = one["statuses"]
    failed = statuses["ERROR"] + statuses["POISON"]
    ended = f"{statuses['COMPLETED'] + failed:,} of {one['total']:,}"
    return (one["id"], one["name"], one["create_time"], ended, failed, ", ".join(one["queues"]))
