"""``taskqueue reprocess`` and the other verbs, ``pause``, ``set``, ``bulk``, ``schedules``, ``batches`` and so on."""

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar

from django.contrib.auth import get_user_model
from django.contrib.postgres.indexes import GinIndex
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError
from django.db import connections
from django.db.models import Model, QuerySet
from django.db.models.functions import Now
from django.utils import timezone

from django_dbtaskqueue.conf.queue import setting_text, typed
from django_dbtaskqueue.core.masking import masked, masked_text
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db.session import Session, alias_for, model_for, only_alias, row_key
from django_dbtaskqueue.flow.schedule import SCHEDULE_FIELDS
from django_dbtaskqueue.flow.shard_move import ShardMove
from django_dbtaskqueue.management import FAILED_CODE, Options, Output, from_now, printable, wrong_usage
from django_dbtaskqueue.models import ApiToken, Attempt, BulkOperation, FailureGroup, Queue, Schedule, TaskHistory
from django_dbtaskqueue.models.control import FAILED, UNFINISHED
from django_dbtaskqueue.operations import actions, bulk as bulk_operations, queue_control, related_tasks, schedules
from django_dbtaskqueue.operations.lookup import aliases_in, locations_on
from django_dbtaskqueue.operations.permissions import CHANGE_SETTINGS, Actor, check_there
from django_dbtaskqueue.operations.schedule_import import OTHER_QUEUES, import_schedules
from django_dbtaskqueue.operations.search import parse, text_of
from django_dbtaskqueue.operations.search.query import MAY_HAVE_ERROR, select, tasks_for
from django_dbtaskqueue.operations.serializers import OPERATION, as_document, text as storable_text
from django_dbtaskqueue.operations.verbs import ID_VERBS, PUT_BACK, QUEUE_VERBS, VerbOptions

MAX_ROWS_MASKED_AT_ONCE = 500
MAX_IDS_PER_REASON = 10  # that the text of a move names
MAX_LISTED_TOKENS, MAX_NOTE_CHARS = 500, 200
M = TypeVar("M", bound=Model)


def _named(options: Options, kind: str, word: str, find: Callable[[Any], M | None]) -> M:
    """Return what ``find`` returns for the name that was given, or raise ``CommandError``."""
    command, name = options["command"], options["name"]
    if name is None:
        raise wrong_usage(f"Give its {word}: taskqueue {command} {options['what']} {word.upper()}.")
    if (row := find(name)) is None:
        raise CommandError(f"There is no {kind} {name!r}. taskqueue {command} lists them.")
    return row


def verb(output: Output, options: Options) -> int:
    """Apply a verb to ids or to a search: preview, question, action, report."""
    words, ids, using = " ".join(options["filter"]), sorted(set(options.get("id", ()))), options["database"]
    queue, chosen = options.get("of_queue", ""), ID_VERBS[options["verb"]]
    if bool(options["filter"]) == bool(ids) or (queue and not ids):
        raise wrong_usage("Name the tasks: --filter SEARCH (such as 'status:ERROR queue:claims'), or --id N [--queue].")
    if ids and (options["limit"] or options["background"]):
        raise wrong_usage("--limit and --background are for --filter. With --id all of these tasks change, at once.")
    tasks = actions.tasks_of(ids, queue, Actor(), using) if ids else tasks_for(parse(words), using, write=True)
    given = VerbOptions(**{one.field: options[one.field] for one in chosen.inputs})
    if ids:
        seen = actions.preview(tasks.filter(pk__in=ids), actions.ActionRequest(chosen, options=given))
    else:
        seen = bulk_operations.preview(chosen, words, using, options=given)
    output.write("\n".join(seen.sentences))
    if options["dry_run"]:
        return output.answer({"dry_run": True, **as_document(seen)})
    output.ask(f"{chosen.label} {'all that match' if seen.eligible is None else f'{seen.eligible} tasks'}?")
    if not ids:
        few = (found := seen.selected) is not None and not found.more and found.number <= actions.MAX_TASKS_PER_ACTION
        if not few or options["background"] or options["limit"]:
            asked = {"options": given, "max_tasks": options["limit"]}
            operation = bulk_operations.start(chosen, words, Actor(), options["reason"], using, **asked)
            output.write(f"Bulk operation {operation.pk} ordered; to stop it: taskqueue bulk cancel {operation.pk}")
            return _ordered(output, operation) if options["background"] else _followed(output, operation)
        # Not ordered by the database: with a limit, it could read the whole table in that order.
        ids = [*select(words, tasks).order_by().values_list("pk", flat=True)[: actions.MAX_TASKS_PER_ACTION + 1]]
    report = actions.act_on_ids(tasks, ids, replace(seen.request, reason=options["reason"]), Actor())
    _skips(output, {reason: len(ids) for reason, ids in report.skips.items()})
    return output.answer(report, f"{chosen.done % {'number': report.changed}}.")


def purge(output: Output, options: Options) -> int:
    """Delete every task of a queue, in any status."""
    check_there([queue := options["queue"]], Actor())
    given = {"database": only_alias(queue, options["database"]), "filter": [text_of(queue=queue)]}
    return verb(output, {**options, **given})


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
    _skips(output, operation.skips)
    verb = PUT_BACK if operation.verb == PUT_BACK.name else ID_VERBS[operation.verb]
    text = f"{verb.done % {'number': operation.changed}}. {operation.note}".strip()
    return output.answer(OPERATION.of(operation), text, FAILED_CODE if operation.state == FAILED else 0)


def _skips(output: Output, skips: dict[str, int]) -> None:
    for reason, count in skips.items():
        output.write(f"skipped {count:,}: {printable(reason)}")


def queue_verb(output: Output, options: Options) -> int:
    """Apply a verb to queues."""
    queues, name = options["queue"], options["verb"]
    verb, length = QUEUE_VERBS[name], options.get("for_time")
    if options["dry_run"]:
        queue_control.places_of_known(queues, options["database"])
        return output.answer({"dry_run": True, "queues": queues}, f"Would {name} {', '.join(queues)}.")
    until = None if length is None else timezone.now() + length
    given = {"reason": options["reason"], "until": until, "using": options["database"]}
    number = queue_control.apply_to_queues(verb, queues, Actor(), **given)
    end = f" until {until:%Y-%m-%d %H:%M:%S %Z}" if until else ""
    return output.answer({"changed": number}, f"{verb.done % {'number': number}}{end}.")


def show_settings(output: Output, options: Options) -> int:
    """Show the settings of a queue: each value, and where it comes from."""
    return _settings(output, options["queue"], _overrides(options))


def set_settings(output: Output, options: Options) -> int:
    """Set limits and other settings of a queue while pollers run. They follow within a heartbeat."""
    queue, values, reset = options["queue"], {}, [name.lower() for name in options["reset"]]
    for text in options["values"]:
        name, _equals, value = (part.strip() for part in text.partition("="))
        if not name or not value:
            raise wrong_usage(f"{text}: write NAME=VALUE, such as max_running=5. To take a setting back: --reset NAME.")
        values[name.lower()] = typed(name.lower(), value)
    if not values and not reset:
        words = f"Say what to set: taskqueue set {queue} NAME=VALUE. taskqueue settings {queue} shows all settings."
        raise wrong_usage(words)
    after, dry, using = _overrides(options), options["dry_run"], options["database"]
    given = {"reset": reset, "reason": options["reason"], "using": using}
    try:
        if dry:
            after = queue_control.new_overrides(queue, after, values, reset)
        else:
            after = queue_control.change_settings(queue, values, Actor(), **given)
    except ImproperlyConfigured as error:  # of what was typed, so not the site's fault
        raise wrong_usage(str(error)) from None
    output.write("Nothing was changed: --dry-run. It would be:" if dry else str(CHANGE_SETTINGS.effect))
    return _settings(output, queue, after, [*values, *reset], **({"dry_run": True} if dry else {}))


def _overrides(options: Options) -> dict[str, object]:
    """Return what operators set of a queue; raise ``UnknownQueue`` for one that is not there."""
    queue = options["queue"]
    check_there([queue], Actor())
    row = Queue.objects.using(alias_for(queue, options["database"])).filter(pk=queue).first()
    return row.changes if row else {}


def _settings(
    output: Output, queue: str, values: Mapping[str, object], only: Sequence[str] = (), **more: object
) -> int:
    """Write the settings of a queue with ``values``, what operators set, laid over; with ``only`` those named."""
    shown = [one for one in queue_control.settings_in_force(queue, values) if not only or one.name in only]
    plain = [one.value if one.value is None or isinstance(one.value, int) else setting_text(one.value) for one in shown]
    facts = [asdict(replace(one, value=value)) for one, value in zip(shown, plain, strict=True)]
    rows = [(one["name"], str(one["value"]), one["source"]) for one in facts]
    return output.table({**more, "queue": queue, "settings": facts}, ("setting", "value", "source"), rows)


def bulk(output: Output, options: Options) -> int:
    """List, show, cancel, undo bulk operations, or carry out those that are waiting."""
    alias, what = alias_for("", options["database"]), options["what"]
    rows: QuerySet[Any] = BulkOperation.objects.using(alias)
    if what == "list":
        newest = list(rows.annotate(clock=Now()).order_by("-pk")[: options["limit"]])
        head = ("id", "state", "done", "changed", "skipped", "ordered", "verb", "search")
        right = ("id", "done", "changed", "skipped", "ordered")
        documents, table = [OPERATION.of(row) for row in newest], [_bulk_line(row) for row in newest]
        return output.table(documents, head, table, none="There is no bulk operation.", right=right)
    if what == "run":
        due = [*rows.filter(state__in=UNFINISHED).values_list("pk", flat=True)]
        chunks = sum(1 for _ in iter(partial(bulk_operations.turn, alias), False))
        left, failed = rows.filter(state__in=UNFINISHED).count(), rows.filter(pk__in=due, state=FAILED).count()
        text = f"{chunks} chunks done, {left} operations unfinished, {failed} failed."
        counts = {"chunks": chunks, "unfinished": left, "failed": failed}
        return output.answer(counts, text, FAILED_CODE if failed else 0)
    operation = _named(options, "bulk operation", "number", lambda pk: rows.filter(pk=pk).first())
    if what == "put-back":
        back = bulk_operations.put_back(operation, Actor(), options["reason"])
        output.write(f"{PUT_BACK.effect}\nBulk operation {back.pk} ordered.")
        return _followed(output, back)
    if what == "cancel" and not bulk_operations.cancel(operation.pk, Actor(), options["reason"], alias):
        ended = f"Bulk operation {operation.pk} has ended already: {operation.state}."
        return output.answer(OPERATION.of(operation), ended, FAILED_CODE)
    operation.refresh_from_db()
    document = OPERATION.of(operation)
    output.facts(document, {**document, "skips": None})
    _skips(output, operation.skips)
    return 0


def _bulk_line(row: Any) -> tuple[object, ...]:
    ordered = from_now(row.create_time, row.clock)
    return (row.pk, row.state, f"{row.progress:.0%}", row.changed, row.skipped, ordered, row.verb, row.query)


def index(output: Output, options: Options) -> int:
    """Create the index for searches of payloads (PostgreSQL). It slows enqueue down; reads and writes go on."""
    queue = options["queue"] or ""
    check_there(filter(None, [queue]), Actor())
    model, alias = model_for(queue), alias_for(queue, options["database"])
    connection = connections[alias]
    if connection.vendor != "postgresql":
        raise CommandError(f"Database {alias!r} is not PostgreSQL. Only PostgreSQL has an index on JSON payloads.")
    gin = GinIndex(fields=["payload"], opclasses=["jsonb_path_ops"], name=f"{model._meta.db_table[:40]}_payload_in")
    valid = "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(%(name)s)"
    found, wanted = Session.on(alias).run(valid, {"name": gin.name}), [] if options["drop"] else [(True,)]
    done = "There is nothing to do."
    if found != wanted:  # one that is not valid, as a killed CREATE leaves it, is made anew
        with connection.schema_editor(atomic=False) as editor:
            changes: list[Any] = [editor.remove_index] * bool(found) + [editor.add_index] * bool(wanted)
            for change in changes:
                change(model, gin, concurrently=True)
        actions.record(alias, Actor(), f"{'create' if wanted else 'drop'}_index", details={"index": gin.name})
        done = f"Index {gin.name} {'created: searches for payload.KEY:VALUE use it' if wanted else 'dropped'}."
    return output.answer({"index": gin.name, "done": done}, done)


def mask(output: Output, options: Options) -> int:
    """Mask secrets in stored texts of failures: written by SQL, or before MASK had the keys."""
    dry_run = options["dry_run"]
    if not dry_run:
        output.ask("Replace the secrets in all stored texts of failures, for good?")
    changed = 0
    for alias, model in (places := locations_on(options["database"])):
        tasks = model._base_manager.using(alias).filter(MAY_HAVE_ERROR, process_result__isnull=False)
        changed += _mask_stored(tasks, "process_result", dry_run=dry_run)
    for alias in aliases_in(places):
        moved = TaskHistory.objects.using(alias).filter(status__in=[Status.ERROR, Status.POISON])
        changed += _mask_stored(moved, "process_result", dry_run=dry_run)
        changed += _mask_stored(Attempt.objects.using(alias).all(), "message", "traceback", dry_run=dry_run)
        changed += _mask_stored(FailureGroup.objects.using(alias).all(), "message", dry_run=dry_run)
    if dry_run:
        return output.answer({"dry_run": True, "would_mask": changed}, f"{changed} stored texts would be masked.")
    actions.record(alias_for("", options["database"]), Actor(), "mask", changed=changed)
    return output.answer({"masked": changed}, f"{changed} stored texts masked.")


def _mask_stored(rows: QuerySet[M], *columns: str, dry_run: bool) -> int:
    """Mask text columns of all rows; return how many changed, or would. What pollers write meanwhile is masked."""
    changed, rest = 0, rows.order_by("pk")
    while page := list(rest.values_list("pk", *columns)[:MAX_ROWS_MASKED_AT_ONCE]):
        for pk, *texts in page:
            before = {name: text for name, text in zip(columns, texts, strict=True) if text}
            after = {name: masked_text(text) for name, text in before.items()}
            if after != before:
                changed += 1 if dry_run else rows.filter(pk=pk, **before).update(**after)
        rest = rows.filter(pk__gt=page[-1][0]).order_by("pk")
    return changed


def shards(output: Output, options: Options) -> int:
    """Show the tasks of a queue on each of its databases, or move those that wait."""
    queue, sources = options["queue"], options["sources"]
    if options["what"] == "show":
        documents = queue_control.shard_documents(queue, Actor(), sources)
        numbers = (*documents[0]["statuses"], "moving")
        rows = [
            (one["database"], "yes" if one["is_shard"] else "no", *one["statuses"].values(), one["moving"])
            for one in documents
        ]
        return output.table(documents, ("database", "polled", *numbers), rows, right=numbers)
    move = ShardMove(queue, options["to"], behind=options["behind"])
    output.ask(f"{queue_control.MOVE_SHARD.effect} Move?")
    report = queue_control.move_shards(move, Actor(), sources=sources, limit=options["limit"], reason=options["reason"])
    moved = [{"from": source, "to": target, "tasks": count} for (source, target), count in report.moved.items()]
    lines = [f"{queue_control.MOVE_SHARD.done % {'number': sum(report.moved.values())}}."]
    lines += [f"{number:,} from {source} to {target}" for (source, target), number in report.moved.items()]
    for reason, names in report.refused.items():
        more = ", …" if len(names) > MAX_IDS_PER_REASON else ""
        lines.append(f"{len(names):,} stay: {reason}: {', '.join(names[:MAX_IDS_PER_REASON])}{more}")
    return output.answer({"moved": moved, "refused": report.refused}, "\n".join(lines))


def make_token(output: Output, options: Options) -> int:
    """Make a token for the JSON API. It is shown once; the database keeps only its hash."""
    user, queues, life = options["user"], options["queue"], options["expires"]
    users = get_user_model()
    if (owner := users._default_manager.filter(**{users.USERNAME_FIELD: user}).first()) is None:
        raise CommandError(f"There is no user {user!r}. Make it first: a token has the permissions of its user.")
    check_there(queues, Actor())
    secret = secrets.token_urlsafe(32)
    digest = hashlib.sha256(secret.encode()).hexdigest()
    end = None if life is None else Now() + life
    note, alias = storable_text("note", options["note"], MAX_NOTE_CHARS), alias_for("", options["database"])
    given = {"user": user, "note": note, "scope": options["scope"], "queues": queues}
    with actions.recorded(alias):
        row = ApiToken.objects.using(alias).create(actor_id=owner.pk, digest=digest, expire_time=end, **given)
        actions.record(alias, Actor(), "make_token", details={"token": row.pk, **given})
    row.refresh_from_db()
    output.write(f"Send this with each request, and store it nowhere else:  Authorization: Bearer {secret}")
    shown = {"queues": ", ".join(queues) or "all", "expires": row.expire_time or "when it is revoked"}
    return output.facts({"token": secret, "hash": digest, **_facts(row)}, {**_facts(row), **shown})


def tokens(output: Output, options: Options) -> int:
    """List the tokens of the JSON API, or end one."""
    rows = ApiToken.objects.using(alias := alias_for("", options["database"]))
    if number := options["revoke"]:
        with actions.recorded(alias):
            if not rows.filter(pk=number).delete()[0]:
                raise CommandError(f"There is no token {number}; taskqueue tokens lists them.")
            actions.record(alias, Actor(), "revoke_token", details={"token": number})
        return output.answer({"revoked": number}, f"Token {number} is refused from now on.")
    listed = list(rows.annotate(clock=Now()).order_by("pk")[:MAX_LISTED_TOKENS])
    head = ("number", "user", "scope", "queues", "expires", "last used", "note")
    none = "There is no token. taskqueue token USER makes one."
    return output.table([_facts(row) for row in listed], head, [_row(row) for row in listed], none=none, right=head[:1])


def _facts(row: ApiToken) -> dict[str, object]:
    facts = {"number": row.pk, "user": row.user, "scope": row.scope, "queues": row.queue_names, "note": row.note}
    return facts | {"created": row.create_time, "expires": row.expire_time, "last_used": row.last_used_time}


def _row(row: Any) -> tuple[object, ...]:
    times = [from_now(time, row.clock) for time in (row.expire_time, row.last_used_time)]
    return (row.pk, row.user, row.scope, ", ".join(row.queue_names) or "all", *times, row.note)


WRITE_WORDS = {"add": schedules.ADD_SCHEDULE, "edit": schedules.EDIT_SCHEDULE}
VERB_WORDS = {name.removesuffix("_schedule"): verb for name, verb in schedules.SCHEDULE_VERBS.items()}
BATCH_WORDS = {name.removesuffix("_batch"): verb for name, verb in related_tasks.BATCH_VERBS.items()}
OPTIONS_OF_IMPORT = ("from", "queue_of", "dry_run")


def run_schedules(output: Output, options: Options) -> int:
    """Show schedules in words and with their next times; add, import, edit, pause, resume, run, reset, delete them."""
    actor, what = Actor(), options["what"]
    fitting = OPTIONS_OF_IMPORT if what == "import" else SCHEDULE_FIELDS if what in WRITE_WORDS else ()
    given = {name: options[name] for name in (*OPTIONS_OF_IMPORT, *SCHEDULE_FIELDS) if name in options}
    others = [*given, *(["database"] if what == "import" and options["database"] else [])]
    if unfit := [f"--{name.replace('_', '-')}" for name in others if name not in fitting]:
        raise wrong_usage(f"schedules {what} takes no {', '.join(unfit)}.")
    if what == "edit" and not given:
        raise wrong_usage("Say what to change, such as --cron '0 7 * * mon-fri'.")
    if what == "list":
        rows = schedules.listed(actor, options["database"])
        documents = [schedules.schedule_document(row, actor) for row in rows]
        lines = [_schedule_line(row, one) for row, one in zip(rows, documents, strict=True)]
        head = ("name", "state", "when", "queue", "next tick", "last tick", "source")
        none = "There is no schedule. Declare one with @periodic, or: taskqueue schedules add NAME …"
        return output.table(documents, head, lines, none=none)
    if what == "import":
        return _import(output, given, actor, options["reason"])
    act: Callable[..., Schedule | None] = schedules.find_schedule
    if what in WRITE_WORDS:
        act = schedules.add_schedule if what == "add" else schedules.edit_schedule
        act = partial(act, values=given, reason=options["reason"])
    elif what in VERB_WORDS:
        act = partial(schedules.act_on_schedule, VERB_WORDS[what], reason=options["reason"])
    row = _named(options, "schedule", "name", partial(act, actor=actor, using=options["database"]))
    if what != "show":
        output.write(f"{(WRITE_WORDS | VERB_WORDS)[what].done % {'number': 1}}.")
    document = schedules.schedule_document(row, actor)
    times = ", ".join(f"{one:%a %Y-%m-%d %H:%M:%S %Z}" for one in document["next_times"])
    shown = {**document, "next_times": times, "edited": ", ".join(row.edited)}
    return output.facts(document, {} if what in VERB_WORDS else shown)


def _import(output: Output, given: Options, actor: Actor, reason: str) -> int:
    if "from" not in given:
        raise wrong_usage(f"Add --from {' or --from '.join(OTHER_QUEUES)}.")
    queue_of, dry_run = {}, "dry_run" in given
    for text in given.get("queue_of", ()):
        task, _equals, queue_of[task] = text.partition("=")
        if not (task and queue_of[task]):
            raise wrong_usage(f"--queue-of {text}: write TASK=QUEUE.")
    found = import_schedules(given["from"], queue_of, actor, dry_run=dry_run, reason=reason)
    rows = []
    for one in found:
        made = one.definition
        words = "; ".join([f"{made.cron} {made.timezone} → {made.queue}", *one.notes]) if made else one.reason
        rows.append((one.name, one.timing, f"{one.result}, paused" if made and one.paused else one.result, words))
    output.table(masked([asdict(one) for one in found]), ("name", "there", "result", "here"), rows)
    left = sum(one.definition is None for one in found)
    end = " Nothing was changed: --dry-run." if dry_run else ""
    output.write(f"{len(found) - left} of {len(found)} schedules can be imported.{end}")
    return FAILED_CODE if left else 0


def _schedule_line(row: Schedule, document: schedules.ScheduleDocument) -> tuple[object, ...]:
    state = "paused" if row.paused else "running" if document["declared"] else "code is gone"
    coming = document["next_times"][0] if document["next_times"] else None
    local = (one and (timezone.localtime(one) if one.tzinfo else one) for one in (coming, row.last_time))
    times = [one and f"{one:%Y-%m-%d %H:%M:%S}" for one in local]
    source = f"{row.source}, edited: {', '.join(row.edited)}" if row.edited else row.source
    return (row.name, state, document["words"], row.queue, *times, source)


def run_batches(output: Output, options: Options) -> int:
    """List batches and workflows, show one, cancel all its tasks, or retry those that failed."""
    actor, using, what = Actor(), options["database"], options["what"]
    if what == "list":
        found = related_tasks.listed_batches(actor, using)
        documents = related_tasks.batch_documents(found)
        head, rows = ("id", "name", "created", "ended", "failed", "queues"), [*map(_batch_line, found, documents)]
        none = "There is no batch. The code makes one with batch() or Workflow."
        return output.table(documents, head, rows, none=none)
    row = _named(options, "batch", "id", lambda pk: related_tasks.find_batch(pk, actor, using))
    if what in BATCH_WORDS:
        changed = related_tasks.act_on_batch(BATCH_WORDS[what], row, actor, reason=options["reason"])
        output.write(f"{BATCH_WORDS[what].done % {'number': changed}}.")
    [document] = related_tasks.batch_documents([row])
    shown = {**document, "queues": ", ".join(document["queues"]), **document["statuses"], "statuses": None}
    return output.facts(document, shown)


def _batch_line(row: Any, one: related_tasks.BatchDocument) -> tuple[object, ...]:
    statuses = one["statuses"]
    failed = statuses["ERROR"] + statuses["POISON"]
    ended = f"{one['total'] - statuses['CREATED'] - statuses['PROCESSING']:,} of {one['total']:,}"
    return (row_key(row), one["name"], one["create_time"], ended, failed, ", ".join(one["queues"]))
