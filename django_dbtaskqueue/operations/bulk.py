"""Bulk operations: a verb over all tasks that match a search, in chunks, carried out by any poller.

``preview`` says what would happen, ``start`` orders it, and each ``turn`` carries out one chunk. One transaction, under
the lock of the operation's row, holds the chunk's effect, the operation's cursor (an id), its counts, the reason of
every skipped task, and the audit. So no chunk is done twice or by two workers at once. After a crash the next worker
continues where the last chunk ended. Tasks enqueued after the start are not changed.
"""

from collections import Counter
from dataclasses import replace

from django.contrib.auth import get_user_model
from django.core.exceptions import PermissionDenied
from django.db import OperationalError, transaction
from django.db.models import F, Max, Min
from django.db.models.functions import Coalesce, Now
from django.utils.translation import gettext as _

from django_dbtaskqueue.core import logger
from django_dbtaskqueue.core.durations import Pauses, clock
from django_dbtaskqueue.core.exceptions import OperationRefused
from django_dbtaskqueue.core.masking import masked_text
from django_dbtaskqueue.db.session import Session, model_named, only_alias
from django_dbtaskqueue.flow.selection import lock_first
from django_dbtaskqueue.models import BulkOperation, TaskChange
from django_dbtaskqueue.models.control import CANCELLED, FAILED, FINISHED, FIRST_WINDOW, RUNNING, UNFINISHED
from django_dbtaskqueue.models.querysets import TaskQuerySet
from django_dbtaskqueue.operations import actions, permissions
from django_dbtaskqueue.operations.actions import ADDITION, CHANGE, ActionRequest, ActReport, Preview
from django_dbtaskqueue.operations.bounded_reads import count_in_time, estimate
from django_dbtaskqueue.operations.lookup import elsewhere, tasks_on
from django_dbtaskqueue.operations.permissions import Actor, User, check, narrow, sole
from django_dbtaskqueue.operations.search import Search, parse, to_text
from django_dbtaskqueue.operations.search.query import select, tasks_for, with_moments
from django_dbtaskqueue.operations.verbs import BULK_VERBS, PURGE, PUT_BACK, TaskVerb, VerbOptions, bulk_verb

__all__ = ["cancel", "preview", "start", "turn"]

TASKS_PER_CHUNK = 500  # and so per transaction
MAX_IDS_PER_WINDOW = 1_000_000  # that one statement reads
FAILED_CHUNK_S = 5.0, 300.0  # in which others go before an operation whose chunk the database refused
MAX_EMPTY_SEARCH_S = 1.0  # of one turn, spent on ids where nothing matches


def request_of(
    verb: str | TaskVerb, q: str | Search, *, reason: str = "", options: VerbOptions | None = None
) -> tuple[ActionRequest, Search]:
    """Return a request and its search, read and checked. Raises ``SearchError`` and ``OperationRefused``."""
    known = bulk_verb(verb if isinstance(verb, str) else verb.name)
    if not (search := parse(q) if isinstance(q, str) else q):
        words = _(
            "An empty search would %(verb)s every task of every queue. Say which: queue:claims, status:ERROR, age:>1d, "
            "or all of these."
        )
        raise OperationRefused(words % {"verb": known.name})
    if known is PURGE and not (len(search.terms) == 1 and len(search.queues()) == 1):
        raise OperationRefused(_("purge deletes one whole queue: queue:claims. To delete a part of one, use delete."))
    return ActionRequest(known, reason.strip(), options or VerbOptions(), to_text(search)), search


def preview(
    verb: str | TaskVerb,
    q: str | Search,
    using: str | None = None,
    *,
    options: VerbOptions | None = None,
    actor: Actor | None = None,
) -> Preview:
    """Count what matches, what would change and, if the verb may end leases, what of it runs. Writes nothing.

    Each number is counted up to 10,000 and within ``OPERATIONS_TIMEOUT``. With an actor only what they may view.
    """
    request, search = request_of(verb, q, options=options)
    tasks = select(search, narrow(tasks_for(search, using, write=True), actor or Actor()))
    left_out = elsewhere(search.queues(), tasks, write=True)
    seen = replace(actions.preview(tasks, request, count_in_time), elsewhere=left_out)
    return replace(seen, estimate=estimate(tasks)) if seen.selected is None or seen.selected.more else seen


def start(
    verb: str | TaskVerb,
    q: str | Search,
    user: User | Actor | None,
    reason: str = "",
    using: str | None = None,
    *,
    source: str = "admin",
    options: VerbOptions | None = None,
    max_tasks: int | None = None,
) -> BulkOperation:
    """Order a bulk operation and record who did; pollers carry it out. ``max_tasks``: change or skip at most this many.

    ``user`` None is the command line. A token for some queues must name one of them in the search. Raises
    ``PermissionDenied``, ``OperationRefused`` (no reason for a verb that needs one, an empty search) and
    ``SearchError``; nothing is written then.
    """
    request, search = request_of(verb, q, reason=reason, options=options)
    actor = user if isinstance(user, Actor) else Actor(user, source)
    queues = search.queues()
    for queue in queues:
        permissions.check_queue(queue, actor)
    check(request.verb, request.reason, actor, queues[0] if len(queues) == 1 else None)
    permissions.check_search(search, actor)
    if actor.scope.queues and len(queues) != 1:
        words = _("This token is for some queues: name one of them in the search, such as queue:%(queue)s.")
        raise OperationRefused(words % {"queue": actor.scope.queues[0]})
    if max_tasks is not None and max_tasks < 1:
        raise OperationRefused(_("A limit is at least 1, not %(number)s.") % {"number": max_tasks})
    using = only_alias(queues[0], using) if request.verb is PURGE else using  # it is of a whole queue
    tasks = tasks_for(search, using, write=True)
    search = with_moments(search, Session.on(tasks.db).now())
    request = replace(request, query=to_text(search))
    request.verb.check(tasks.model, tasks.db, request.options, actor)
    expected = preview(request.verb, search, tasks.db, options=request.options, actor=actor).selected
    last_id = int(tasks.aggregate(last=Max("pk"))["last"] or 0)
    first_id = int(tasks.order_by("pk").values_list("pk", flat=True).first() or 1) - 1
    number = None if expected is None else expected.number
    given = {"estimate": number, "estimate_more": expected is None or expected.more, "max_tasks": max_tasks}
    return _ordered(tasks, request, actor, first_id=first_id, last_id=last_id, **given)


def _ordered(tasks: TaskQuerySet, request: ActionRequest, actor: Actor, **columns: object) -> BulkOperation:
    with actions.recorded(tasks.db):
        operation = actions.new_operation(tasks, request, actor, cursor=columns["first_id"], **columns)
        operation.refresh_from_db(using=tasks.db)
        details = {"action": request.verb.words(request.options)} if request.verb.inputs else {}
        _record(operation, request.verb, actor, reason=request.reason, details=details)
        words = request.verb.words(request.options, request.reason)
        actions.log(actor, [operation], ADDITION, f"{words}: {operation.query}")
    return operation


def _record(operation: BulkOperation, verb: TaskVerb, actor: Actor, **of: object) -> None:
    given = {"query": operation.query, "queue": sole(permissions.queues_in(operation.query)), "operation": operation}
    actions.record(str(operation._state.db), actor, verb, **given, **of)


def why_not_put_back(operation: BulkOperation) -> str:
    """Return why the tasks of an operation cannot be put back as they were, or nothing."""
    verb, alias = BULK_VERBS.get(operation.verb), str(operation._state.db)
    if verb is None or not verb.undoable:
        return _("%(verb)s cannot be undone.") % {"verb": verb.label if verb else PUT_BACK.label}
    if operation.state in UNFINISHED:
        return _("It has not ended yet. Cancel it first.")
    others = BulkOperation.objects.using(alias).filter(verb=PUT_BACK.name, options__operation=operation.pk)
    if (other := others.exclude(state__in=(CANCELLED, FAILED)).first()) is not None:
        return _("Bulk operation %(number)s puts its tasks back already.") % {"number": other.pk}
    if not operation.changes.using(alias).filter(skip_reason="").exists():
        return _("There is no record of tasks that it changed: it changed none, or the record was deleted with age.")
    return ""


def put_back(operation: BulkOperation, actor: Actor, reason: str = "") -> BulkOperation:
    """Order that the tasks an operation changed become what they were before; tasks that changed since are skipped.

    Needs the permission of the operation's verb. Raises ``OperationRefused`` where nothing can be put back.
    """
    permissions.check_cancel(operation, verb_of(operation), actor)
    if refusal := why_not_put_back(operation):
        raise OperationRefused(refusal)
    ids = operation.changes.using(operation._state.db).filter(skip_reason="").aggregate(first=Min("pk"), last=Max("pk"))
    request = ActionRequest(PUT_BACK, reason.strip(), query=operation.query)
    options = {**request.options.to_json(), "operation": operation.pk, "verb": operation.verb}
    given = {"first_id": ids["first"] - 1, "last_id": ids["last"], "estimate": operation.changed}
    return _ordered(_tasks(operation), request, actor, options=options, **given)


def verb_of(operation: BulkOperation) -> TaskVerb:
    """Return the verb whose permission an operation needs: its own, or the one that it puts back."""
    return bulk_verb(str(operation.options.get("verb", operation.verb)))


def cancel(
    pk: int, user: User | Actor | None, reason: str = "", using: str | None = None, *, source: str = "admin"
) -> bool:
    """Stop an operation between two chunks; what is done stays done. False: it had ended.

    Needs the permission of the operation's verb: on each queue that its search names, or, if it names none and
    somebody else ordered it, on all queues.
    """
    alias = using or tasks_for(Search(), None, write=True).db
    actor = user if isinstance(user, Actor) else Actor(user, source)
    with actions.recorded(alias):
        operation = BulkOperation.objects.using(alias).select_for_update().get(pk=pk)
        permissions.check_cancel(operation, verb_of(operation), actor)
        if operation.state not in UNFINISHED:
            return False
        words = _("cancelled by %(who)s") % {"who": actor.name}
        end(operation, CANCELLED, f"{words}: {reason}" if reason else words)
        operation.save(using=alias)
        details = {"cancelled": operation.pk, "changed": operation.changed}
        _record(operation, verb_of(operation), actor, reason=reason, details=details)
        actions.log(actor, [operation], CHANGE, words)
    return True


_pauses = Pauses[tuple[str, int]](*FAILED_CHUNK_S)


def turn(using: str) -> bool:
    """Carry out one chunk of one unfinished operation; return whether there was one to carry out.

    Operations take turns. One whose search, verb or user is no longer valid ends as FAILED, with the reason. A lost
    connection or a deadlock is raised; the chunk is rolled back, and the next turn does it again.
    """
    waiting = BulkOperation.objects.using(using).filter(state__in=UNFINISHED).order_by("update_time", "pk")
    if resting := [pk for alias, pk in _pauses.resting() if alias == using]:
        waiting = others if (others := waiting.exclude(pk__in=resting)).exists() else waiting
    if (due := waiting.values_list("pk", flat=True).first()) is None:
        return False
    try:
        with transaction.atomic(using=using):
            if (operation := lock_first(waiting)) is None:
                return False
            due = operation.pk
            step(operation)
    except OperationalError as error:
        _pauses.rest((using, due))  # others go first
        logger.warning("Bulk operation %s is tried again: %s", due, error)
        raise
    except Exception as error:
        logger.exception("Bulk operation %s failed", due)
        rows, now, note = waiting.filter(pk=due), Now(), masked_text(f"{type(error).__name__}: {error}")
        rows.update(state=FAILED, note=note, finish_time=now, update_time=now)
    return True


# -- one chunk, inside the transaction that holds the operation's row --------------------------------------------------


def step(operation: BulkOperation) -> None:
    """Carry out the next chunk and write what came of it; end the operation after the last one."""
    verb, user = verb_of(operation), None
    if operation.actor_id:  # with the permissions of now: one that was revoked ends the operation
        user = get_user_model()._default_manager.filter(pk=operation.actor_id).first()
        if user is None:
            raise PermissionDenied(_("The user %(who)s, who ordered it, no longer exists.") % {"who": operation.actor})
    actor = Actor(user, operation.source)
    if not actor.may(verb):
        words = _("%(who)s may not use %(verb)s any more.")
        raise PermissionDenied(words % {"who": operation.actor, "verb": verb.name})
    operation.start_time = operation.start_time or Now()
    operation.state = RUNNING
    shown, change = (PUT_BACK, _put_back_step) if operation.verb == PUT_BACK.name else (verb, _change)
    _count_in(operation, change(operation, verb, actor), shown)
    if operation.cursor >= operation.last_id or _remaining(operation) == 0:
        end(operation, FINISHED)
        words = shown.words(VerbOptions.from_json(operation.options), operation.reason)
        actions.log(actor, [operation], CHANGE, f"{words}: {operation.changed} / {operation.skipped}")
    operation.update_time = Now()
    operation.save(using=operation._state.db)


def _change(operation: BulkOperation, verb: TaskVerb, actor: Actor) -> ActReport:
    request = ActionRequest(verb, operation.reason, VerbOptions.from_json(operation.options), operation.query)
    tasks = narrow(_tasks(operation), actor)
    ids = _next_chunk(operation, tasks, select(operation.query, tasks))
    return actions.change_tasks(_tasks(operation), ids, request, actor) if ids else ActReport()


def _put_back_step(operation: BulkOperation, verb: TaskVerb, actor: Actor) -> ActReport:
    tasks, of = narrow(_tasks(operation), actor), operation.options["operation"]
    rest = TaskChange.objects.using(tasks.db).filter(
        operation_id=of, pk__gt=operation.cursor, pk__lte=operation.last_id, skip_reason=""
    )
    change = rest.order_by("pk").first()
    operation.cursor = operation.last_id if change is None else change.pk
    return ActReport() if change is None else actions.restore_tasks(change, tasks, verb, actor)


def _tasks(operation: BulkOperation) -> TaskQuerySet:
    return tasks_on(str(operation._state.db), model_named(operation.location))


def _next_chunk(operation: BulkOperation, tasks: TaskQuerySet, matching: TaskQuerySet) -> list[int]:
    """Return the ids of the next tasks that match, from growing windows of ids; move the cursor to the window's end."""
    deadline = clock.monotonic() + MAX_EMPTY_SEARCH_S
    size = min(TASKS_PER_CHUNK, _remaining(operation))
    while operation.cursor < operation.last_id:
        rest = tasks.filter(pk__gt=operation.cursor, pk__lte=operation.last_id).order_by("pk")
        if (first := rest.values_list("pk", flat=True).first()) is None:
            operation.cursor = operation.last_id
            break
        last = min(first + operation.window_size - 1, operation.last_id)
        ids = list(matching.filter(pk__gte=first, pk__lte=last).order_by("pk").values_list("pk", flat=True)[:size])
        operation.cursor = ids[-1] if len(ids) == size else last
        if ids:
            operation.window_size = FIRST_WINDOW
            return ids
        operation.window_size = min(operation.window_size * 2, MAX_IDS_PER_WINDOW)
        if clock.monotonic() > deadline:
            break
    return []


def _remaining(operation: BulkOperation) -> int:
    most = operation.max_tasks
    return TASKS_PER_CHUNK if most is None else most - operation.changed - operation.skipped


def _count_in(operation: BulkOperation, report: ActReport, verb: TaskVerb) -> None:
    alias = str(operation._state.db)
    operation.changed += report.changed
    operation.skipped += report.skipped
    operation.skips = dict(Counter(operation.skips) + Counter({why: len(ids) for why, ids in report.skips.items()}))
    if (entry := operation.audit.using(alias).order_by("pk").first()) is not None:
        entry.changed, entry.skipped = operation.changed, operation.skipped
        entry.save(using=alias, update_fields=["changed", "skipped"])
        actions.record_changes(entry, verb, report.tasks)
        skips = report.skips.items()
        rows = [actions.change_of(entry, operation.location, ids, skip_reason=why[:500]) for why, ids in skips]
        TaskChange.objects.using(alias).bulk_create(rows)


def end(operation: BulkOperation, state: str, words: str = "") -> None:
    """Set an operation's end; the caller saves it."""
    operation.state = state
    operation.note = words or operation.note
    operation.finish_time = Coalesce(F("finish_time"), Now())
