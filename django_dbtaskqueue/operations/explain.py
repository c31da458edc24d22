"""Why a task does not run: one sentence for the task's page, the command line and the API.

``explain`` reads at most nine rows or short ranges by an index. It names what an operator must mend first.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from itertools import chain

from django.db.models.functions import Now
from django.utils.translation import gettext as _

from django_dbtaskqueue import registry
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.overrides import overridden_settings
from django_dbtaskqueue.core.columns import LONG
from django_dbtaskqueue.core.durations import format_duration
from django_dbtaskqueue.core.exceptions import SearchTooSlow, UnknownQueue
from django_dbtaskqueue.core.masking import masked_text
from django_dbtaskqueue.core.sql.checkout import NO_HANDLER
from django_dbtaskqueue.core.sql.dialects import GROUP, PARENTS
from django_dbtaskqueue.core.states import TERMINAL, Status
from django_dbtaskqueue.models import AbstractTask, Queue, TaskHistory
from django_dbtaskqueue.models.tasks import IS_READY
from django_dbtaskqueue.operations.bounded_reads import ReadyPosition, limit_use, ready_position, statement_timeout
from django_dbtaskqueue.operations.queue_stats import living, pauses
from django_dbtaskqueue.operations.related_tasks import suspension, waits_for
from django_dbtaskqueue.operations.serializers import message_of, uniqueness_note

__all__ = ["Explanation", "explain"]

MAX_POLLERS_READ, MAX_POLLERS_NAMED = 1000, 3
IDLE_STATES = ("PAUSED", "ENDING")  # of a poller that takes no task


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a task does not run: a stable code, a sentence, and the facts that the sentence names."""

    code: str
    sentence: str
    facts: Mapping[str, object] = field(default_factory=dict)  # values of JSON, and times

    def __str__(self) -> str:
        return self.sentence


def explain(task: AbstractTask | TaskHistory) -> Explanation:
    """Return why a task does not run, or that it runs. The row is read again, so the answer is of now.

    Who may see the task may see the answer: it names the queue's own pollers and tasks, and secrets are masked.
    """
    alias, model = str(task._state.db or "default"), type(task)
    row = model._base_manager.using(alias).filter(pk=task.pk).defer(*LONG).annotate(clock=Now()).first()
    if row is None and isinstance(task, AbstractTask):
        moved = TaskHistory.objects.using(alias).filter(location=model._meta.label_lower, task_id=task.pk)
        row = moved.order_by("-pk").defer(*LONG).annotate(clock=Now()).first()
    if row is None:
        return Explanation("gone", _("The task is no longer there: it was deleted."))
    if isinstance(row, TaskHistory) or row.status in TERMINAL:
        found = _finished(row)
    else:
        case = _Case(row, alias)
        found = next(chain.from_iterable(reasons(case) for reasons in REASONS))
    note = uniqueness_note(row.reference)
    return replace(found, sentence=f"{found.sentence} {note}") if note else found


@dataclass(frozen=True, slots=True)
class _Server:
    instance: str
    state: str
    slots: int
    held: int
    types: frozenset[str] | None  # None: its row does not say
    tags: frozenset[str] | None

    def may_take(self, task: AbstractTask) -> bool:
        return self.has_type(task) and self.has_tag(task)

    def has_type(self, task: AbstractTask) -> bool:
        return self.types is None or (task.payload_type or "") in self.types

    def has_tag(self, task: AbstractTask) -> bool:
        return task.tag is None or self.tags is None or task.tag in self.tags


class _Case:
    """An unfinished task, and what is read about it when a reason asks."""

    def __init__(self, task: AbstractTask, alias: str) -> None:
        self.task = task
        self.alias = alias
        self.now: datetime = vars(task)["clock"]  # what the query annotated
        self.lapsed = task.status == Status.PROCESSING and task.next_process_time <= self.now

    @cached_property
    def servers(self) -> list[_Server]:
        """The living pollers that serve the queue."""
        rows = living(self.alias).order_by("pk").values_list("instance", "state", "slots", "held", "queues")
        return [
            _Server(instance, state, slots, held, _names(one, "types"), _names(one, "tags"))
            for instance, state, slots, held, reported in rows[:MAX_POLLERS_READ]
            for one in reported
            if (one.get("queue") if isinstance(one, dict) else one) == self.task.queue
        ]

    @cached_property
    def able(self) -> list[_Server]:
        """Those of them that may take the task and take tasks at present."""
        return [one for one in self.servers if one.may_take(self.task) and one.state not in IDLE_STATES]

    @cached_property
    def settings(self) -> conf.QueueSettings | None:
        """What the queue is set to; None for a queue that is not known."""
        with suppress(UnknownQueue):
            return overridden_settings(self.task.queue, self.alias)
        return None

    @cached_property
    def position(self) -> ReadyPosition | None:
        """Its position in the ready order; None where the database did not answer in time."""
        with suppress(SearchTooSlow), statement_timeout(self.alias):
            return ready_position((self.alias, type(self.task)), self.task.queue, self.task.pk)
        return None

    def held(self, types: list[str] | None = None) -> Counter[str]:
        """Return how many of the queue's tasks each poller holds; with ``types`` of these payload types only."""
        found: Counter[str] = Counter()
        for (holder, payload_type), number in (self.position.held if self.position else {}).items():
            found[holder] += number if types is None or (payload_type or "") in types else 0
        return found


def _names(reported: object, key: str) -> frozenset[str] | None:
    names = reported.get(key) if isinstance(reported, dict) else None
    return frozenset(map(str, names)) if isinstance(names, list) else None


# -- the reasons, in the order in which they must be mended: the first one is told -------------------------------------


def _because(code: str, text: str, words: Mapping[str, object] | None = None, /, **facts: object) -> Explanation:
    """Return a reason; ``words`` are what the sentence says in place of a fact, or besides."""
    return Explanation(code, text % {**facts, **(words or {})}, facts)


def _finished(row: AbstractTask | TaskHistory) -> Explanation:
    ended = row.finish_time or row.last_update_time
    facts: dict[str, object] = {"status": row.status, "finished": ended}
    text = _("The task ended in %(status)s %(time)s ago.")
    if row.status != Status.COMPLETED and (error := message_of(row.process_result)):
        facts["error"] = error
        text = _("The task ended in %(status)s %(time)s ago: %(error)s")
    if isinstance(row, TaskHistory):
        facts["moved"] = row.moved_time
        text += " " + _("It is in the history.")
    return _because("finished", text, {"time": _span(vars(row)["clock"], ended)}, **facts)


def _of_the_lease(case: _Case) -> Iterator[Explanation]:
    """The task runs, or its time to live or its attempts are used up."""
    task, now = case.task, case.now
    until, used = task.next_process_time, {"attempt": task.attempt, "max_attempts": task.max_attempts}
    if task.status == Status.PROCESSING and not case.lapsed:
        text = _("%(poller)s has held the lease for %(time)s; the lease ends in %(left)s unless it is renewed.")
        words = {"poller": task.poller_instance or "?", "time": _span(now, task.start_time), "left": _span(now, until)}
        yield _because("leased", text, words, poller=task.poller_instance, since=task.start_time, until=until)
    if task.expire_time is not None and task.expire_time <= now:
        text = _(
            "Its time to live ended %(time)s ago: the task will not be started. The next checkout or housekeeping "
            "ends it."
        )
        yield _because("expired", text, {"time": _span(now, task.expire_time)}, expired=task.expire_time)
    if task.attempt >= task.max_attempts:
        if case.lapsed:
            yield from _unserved(case)
            text = _("The lease of its last attempt ran out %(time)s ago: a poller will write ERROR.")
            yield _because("lease_expired", text, {"time": _span(now, until)}, **used, until=until)
        text = _(
            "All %(max_attempts)s attempts are used, so no poller takes the task. "
            "Cancel it, then reprocess it from POISON."
        )
        yield _because("attempts_used", text, **used)


def _of_the_pause(case: _Case) -> Iterator[Explanation]:
    reason, queue = case.task.parked_by or "", case.task.queue
    if (suspended := suspension(case.task, case.now)) is not None:
        yield Explanation(*suspended)
    if reason == PARENTS:
        yield Explanation("parents", *waits_for(case.task, case.alias))
    elif reason and reason != GROUP and not reason.startswith(NO_HANDLER):
        yield _because("parked", _("The task is parked: %(reason)s."), reason=masked_text(reason))
    if found := pauses(Queue.objects.using(case.alias).filter(pk=queue)).get(queue):
        text = _("Queue %(queue)s is paused (%(known)s).") if found.note else _("Queue %(queue)s is paused.")
        facts = {"queue": queue, "by": found.by, "reason": found.reason, "until": found.until}
        yield _because("paused", text, {"known": found.note}, **facts)


def _unserved(case: _Case) -> Iterator[Explanation]:
    if not case.servers:
        text = _("No living poller serves queue %(queue)s. Start one: manage.py runtaskpoller --queue %(queue)s")
        yield _because("no_poller", text, queue=case.task.queue)


def _of_the_pollers(case: _Case) -> Iterator[Explanation]:
    """No poller of the queue can take the task."""
    task, queue = case.task, case.task.queue
    parked = (task.parked_by or "").startswith(NO_HANDLER)
    if not any(one.has_type(task) and (one.types is not None or not parked) for one in case.servers):
        text = _("No living poller of queue %(queue)s has a processor for payload type %(type)s. Deploy its code.")
        yield _because("no_processor", text, type=task.payload_type or "plain JSON", queue=queue)
    if parked:
        text = _("The task is parked: %(reason)s. A poller has one now, and makes the task ready again within 30 s.")
        yield _because("parked", text, reason=task.parked_by)
    if not (able := [one for one in case.servers if one.may_take(task)]):
        text = _("No living poller of queue %(queue)s takes tag %(tag)s and has a processor for the payload type, too.")
        if not any(one.has_tag(task) for one in case.servers):
            text = _("No living poller of queue %(queue)s takes tag %(tag)s. Start one with --tag %(tag)s.")
        yield _because("no_tag", text, tag=task.tag, queue=queue)
    if not case.able:
        states = {one.instance: one.state for one in able}
        known = ", ".join(f"{name} ({state})" for name, state in list(states.items())[:MAX_POLLERS_NAMED])
        text = _("The pollers that may take the task take none at present: %(pollers)s.")
        yield _because("pollers_idle", text, {"pollers": known}, pollers=states)


def _of_the_time(case: _Case) -> Iterator[Explanation]:
    """The queue takes no task, or it is not the task's turn yet."""
    task, due = case.task, case.task.next_process_time
    if case.settings is not None and case.settings.concurrency == 0:
        text = _("The concurrency of queue %(queue)s is 0: no poller takes its tasks.")
        yield _because("concurrency", text, queue=task.queue, limit=0)
    if task.parked_by == GROUP:
        yield _behind_head(case)
    if not case.lapsed and due > case.now:
        text = _("The task is due in %(time)s.")
        if task.attempt and task.process_result is not None and task.result is None:  # as ``_failed_last``
            text = _("Attempt %(attempt)s of %(max_attempts)s is due in %(time)s, because the last one failed.")
        facts = {"due": due, "attempt": task.attempt + 1, "max_attempts": task.max_attempts}
        yield _because("not_due", text, {"time": _span(case.now, due)}, **facts)


def _behind_head(case: _Case) -> Explanation:
    task, facts = case.task, dict[str, object](group=case.task.group_key)
    rows = type(task)._base_manager.using(case.alias).filter(IS_READY, queue=task.queue)
    if (head := rows.filter(group_key=task.group_key).values_list("pk", "status").first()) is None:
        return _because("group", _("The task waits for its turn in group %(group)s."), **facts)
    facts |= {"head": head[0], "status": head[1]}
    text = _("The task waits behind task %(head)s of its group %(group)s, which is %(status)s.")
    if case.settings is not None and case.settings.max_running_per_group > 1:
        facts["limit"] = case.settings.max_running_per_group
        text += " (max_running_per_group=%(limit)s)"
    return _because("group", text, **facts)


def _of_the_limits(case: _Case) -> Iterator[Explanation]:
    """A limit of the queue over all pollers, or of each poller, or its slots."""
    task, settings = case.task, case.settings
    if settings and settings.rate_per_group is not None and task.ready_time and task.ready_time > case.now:
        text = _("The task can start in %(time)s, because tasks of group %(group)s may start %(rate)s.")
        time, rate = _span(case.now, task.ready_time), str(settings.rate_per_group)
        yield _because("rate_per_group", text, group=task.group_key, rate=rate, time=time)
    use = limit_use((case.alias, type(task)), task.queue)
    if use is not None and use.reached:
        text = _("The limit %(setting)s of queue %(queue)s is reached, over all pollers: %(use)s.")
        facts = {"queue": task.queue, "running": use.running, "limit": use.max_running}
        yield _because(use.reached, text, {"setting": use.reached, "use": use}, **facts)
    limits: list[tuple[int | None, list[str] | None]] = [(settings.concurrency if settings else None, None)]
    if (made := registry.find(task.queue, task.payload_type)) is not None and made.concurrency is not None:
        limits.append((made.concurrency * (made.batch or 1), registry.types_of(task.queue, (made,))))
    for limit, types in limits:
        held = case.held(types)
        if limit is not None and all(held[one.instance] >= limit for one in case.able):
            text = _("Each poller that may take the task holds as many as the concurrency allows: %(limit)s.")
            yield _because("concurrency", text, limit=limit, pollers=len(case.able))
    if all(one.slots and one.held >= one.slots for one in case.able):
        text = _("Each poller that may take the task is busy: %(slots)s slots are full.")
        turn, facts = _place(case)
        yield _because("busy", text + turn, pollers=len(case.able), slots=sum(one.slots for one in case.able), **facts)


def _waiting(case: _Case) -> Iterator[Explanation]:
    task, until = case.task, case.task.next_process_time
    turn, facts = _place(case)
    words = {"poller": task.poller_instance or "?", "time": _span(case.now, until)}
    if case.lapsed:
        text = _("The lease of %(poller)s ran out %(time)s ago: the next checkout takes the task over.")
        yield _because("lease_expired", text, words, **facts, poller=task.poller_instance, until=until)
    yield _because("waiting", _("The task has been due for %(time)s.") + turn, words, due=until, **facts)


REASONS: tuple[Callable[[_Case], Iterator[Explanation]], ...] = (
    _of_the_lease, _of_the_pause, _unserved, _of_the_pollers, _of_the_time, _of_the_limits, _waiting,
)  # fmt: skip


def _place(case: _Case) -> tuple[str, dict[str, object]]:
    """Return where a due task stands in the ready order, as a sentence and as facts; nothing if that is not known."""
    if (found := case.position) is None:
        return "", {}
    words = {"position": found.position, "waiting": found.waiting}
    text = _("It is number %(position)s of %(waiting)s waiting tasks, by priority and then the oldest first.")
    exact = found.position.exact and found.waiting.exact
    return f" {text % words}", {**{name: count.number for name, count in words.items()}, "exact": exact}


def _span(now: datetime, time: datetime | None) -> str:
    return "?" if time is None else format_duration(abs(now - time), rough=True)
