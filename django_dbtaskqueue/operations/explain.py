"""Why a task does not run: one sentence for the task's page, the command line and the API.

``explain`` reads at most nine rows or short ranges by an index. It names what an operator must mend first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property

from django.db.models.functions import Now
from django.utils.translation import gettext as _

from django_dbtaskqueue import registry
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.overrides import queue_settings
from django_dbtaskqueue.core.columns import LONG
from django_dbtaskqueue.core.durations import format_duration
from django_dbtaskqueue.core.exceptions import SearchTooSlow, UnknownQueue
from django_dbtaskqueue.core.masking import masked_text
from django_dbtaskqueue.core.sql.checkout import NO_HANDLER
from django_dbtaskqueue.core.sql.dialects import GROUP, PARENTS
from django_dbtaskqueue.core.states import TERMINAL, Status
from django_dbtaskqueue.models import AbstractTask, Queue, TaskHistory
from django_dbtaskqueue.models.control import IN_EFFECT
from django_dbtaskqueue.models.tasks import IS_READY
from django_dbtaskqueue.operations.bounded_reads import ReadyPosition, limit_use, ready_position, statement_timeout
from django_dbtaskqueue.operations.queue_stats import living
from django_dbtaskqueue.operations.related_tasks import suspension, waits_for
from django_dbtaskqueue.operations.serializers import message_of, pause_note, uniqueness_note

__all__ = ["Explanation", "explain"]

MAX_POLLERS_READ = 1000
MAX_POLLERS_NAMED = 3
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
        found = next(one for reason in REASONS if (one := reason(case)) is not None)
    note = uniqueness_note(row.reference)
    return replace(found, sentence=f"{found.sentence} {note}") if note else found


# -- what is known -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Server:
    """A living poller of the task's queue."""

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
    def pause(self) -> Queue | None:
        """The queue's row, if a pause is in effect."""
        return Queue.objects.using(self.alias).filter(IN_EFFECT, pk=self.task.queue).first()

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
            return queue_settings(self.task.queue, self.alias)
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


# -- the reasons, in the order in which they must be mended ------------------------------------------------------------


def _finished(row: AbstractTask | TaskHistory) -> Explanation:
    ended = row.finish_time or row.last_update_time
    facts: dict[str, object] = {"status": row.status, "finished": ended}
    text = _("The task ended in %(status)s %(time)s ago.")
    if row.status != Status.COMPLETED and (error := message_of(row.process_result)):
        facts["error"] = error
        text = _("The task ended in %(status)s %(time)s ago: %(error)s")
    text %= {**facts, "time": _span(vars(row)["clock"], ended)}
    if isinstance(row, TaskHistory):
        facts["moved"] = row.moved_time
        text += " " + _("It is in the history.")
    return Explanation("finished", text, facts)


def _leased(case: _Case) -> Explanation | None:
    task = case.task
    if task.status != Status.PROCESSING or case.lapsed:
        return None
    facts = {"poller": task.poller_instance, "since": task.start_time, "until": task.next_process_time}
    text = _("%(poller)s has held the lease for %(time)s; the lease ends in %(left)s unless it is renewed.") % {
        "poller": task.poller_instance or "?",
        "time": _span(case.now, task.start_time),
        "left": _span(case.now, task.next_process_time),
    }
    return Explanation("leased", text, facts)


def _expired(case: _Case) -> Explanation | None:
    task = case.task
    if task.expire_time is None or task.expire_time > case.now:
        return None
    text = _("Its time to live ended %(time)s ago: the task will not be started. The next checkout ends it.")
    return Explanation("expired", text % {"time": _span(case.now, task.expire_time)}, {"expired": task.expire_time})


def _unserved(case: _Case) -> Explanation | None:
    if case.servers:
        return None
    text = _("No living poller serves queue %(queue)s. Start one: manage.py runtaskpoller --queue %(queue)s")
    return Explanation("no_poller", text % {"queue": case.task.queue}, {"queue": case.task.queue})


def _out_of_attempts(case: _Case) -> Explanation | None:
    task = case.task
    if task.attempt < task.max_attempts:
        return None
    facts = {"attempt": task.attempt, "max_attempts": task.max_attempts}
    if case.lapsed:
        if unserved := _unserved(case):
            return unserved
        text = _("The lease of its last attempt ran out %(time)s ago: a poller will write ERROR.")
        text %= {"time": _span(case.now, task.next_process_time)}
        return Explanation("lease_expired", text, {**facts, "until": task.next_process_time})
    text = _(
        "All %(max_attempts)s attempts are used, so no poller takes the task. Cancel it, then reprocess it from POISON."
    )
    return Explanation("attempts_used", text % facts, facts)


def _parked(case: _Case) -> Explanation | None:
    if (found := suspension(case.task, case.now)) is not None:
        return Explanation(*found)
    reason = case.task.parked_by
    if not reason or reason == GROUP or reason.startswith(NO_HANDLER):
        return None
    if reason == PARENTS:
        return Explanation("parents", *waits_for(case.task, case.alias))
    reason = masked_text(reason)
    return Explanation("parked", _("The task is parked: %(reason)s.") % {"reason": reason}, {"reason": reason})


def _paused(case: _Case) -> Explanation | None:
    row = case.pause
    if row is None:
        return None
    facts = {"queue": row.name, "by": row.paused_by, "reason": row.paused_reason, "until": row.paused_until}
    known = pause_note(row.paused_by, row.paused_reason, row.paused_until)
    text = _("Queue %(queue)s is paused (%(known)s).") if known else _("Queue %(queue)s is paused.")
    return Explanation("paused", text % {"queue": row.name, "known": known}, facts)


def _without_processor(case: _Case) -> Explanation | None:
    task = case.task
    parked = (task.parked_by or "").startswith(NO_HANDLER)
    having_type = [one for one in case.servers if one.has_type(task) and (one.types is not None or not parked)]
    given = {"type": task.payload_type or "plain JSON", "queue": task.queue}
    if not having_type:
        text = _("No living poller of queue %(queue)s has a processor for payload type %(type)s. Deploy its code.")
        return Explanation("no_processor", text % given, given)
    if not parked:
        return None
    text = _("The task is parked: %(reason)s. A poller has one now, and makes the task ready again within 30 s.")
    return Explanation("parked", text % {"reason": task.parked_by}, {"reason": task.parked_by})


def _without_tag(case: _Case) -> Explanation | None:
    task = case.task
    if any(one.may_take(task) for one in case.servers):
        return None
    text = _("No living poller of queue %(queue)s takes tag %(tag)s. Start one with --tag %(tag)s.")
    if any(one.has_tag(task) for one in case.servers):
        text = _("No living poller of queue %(queue)s takes tag %(tag)s and has a processor for the payload type, too.")
    facts = {"tag": task.tag, "queue": task.queue}
    return Explanation("no_tag", text % facts, facts)


def _idle_pollers(case: _Case) -> Explanation | None:
    if case.able:
        return None
    states = {one.instance: one.state for one in case.servers if one.may_take(case.task)}
    known = ", ".join(f"{name} ({state})" for name, state in list(states.items())[:MAX_POLLERS_NAMED])
    text = _("The pollers that may take the task take none at present: %(pollers)s.")
    return Explanation("pollers_idle", text % {"pollers": known}, {"pollers": states})


def _stopped(case: _Case) -> Explanation | None:
    if case.settings is None or case.settings.concurrency != 0:
        return None
    text = _("The concurrency of queue %(queue)s is 0: no poller takes its tasks.")
    return Explanation("concurrency", text % {"queue": case.task.queue}, {"queue": case.task.queue, "limit": 0})


def _behind_head(case: _Case) -> Explanation | None:
    task = case.task
    if task.parked_by != GROUP:
        return None
    rows = type(task)._base_manager.using(case.alias).filter(IS_READY, queue=task.queue)
    head = rows.filter(group_key=task.group_key).values_list("pk", "status").first()
    facts: dict[str, object] = {"group": task.group_key}
    if head is None:
        return Explanation("group", _("The task waits for its turn in group %(group)s.") % facts, facts)
    facts |= {"head": head[0], "status": head[1]}
    text = _("The task waits behind task %(head)s of its group %(group)s, which is %(status)s.") % facts
    if case.settings is not None and case.settings.max_running_per_group > 1:
        facts["limit"] = case.settings.max_running_per_group
        text += f" (max_running_per_group={facts['limit']})"
    return Explanation("group", text, facts)


def _not_due(case: _Case) -> Explanation | None:
    task = case.task
    if case.lapsed or task.next_process_time <= case.now:
        return None
    facts = {"due": task.next_process_time, "attempt": task.attempt + 1, "max_attempts": task.max_attempts}
    text = _("The task is due in %(time)s.")
    if task.attempt:
        text = _("Attempt %(attempt)s of %(max_attempts)s is due in %(time)s, because the last one failed.")
    return Explanation("not_due", text % {**facts, "time": _span(case.now, task.next_process_time)}, facts)


def _over_limit(case: _Case) -> Explanation | None:
    ready, rate = case.task.ready_time, case.settings and case.settings.rate_per_group
    if rate is not None and ready is not None and ready > case.now:
        facts: dict[str, object] = {"group": case.task.group_key, "rate": str(rate), "time": _span(case.now, ready)}
        text = _("The task can start in %(time)s, because tasks of group %(group)s may start %(rate)s.") % facts
        return Explanation("rate_per_group", text, facts)
    use = limit_use((case.alias, type(case.task)), case.task.queue)
    if use is None or not use.reached:
        return None
    facts = {"queue": case.task.queue, "running": use.running, "limit": use.max_running}
    text = _("The limit %(setting)s of queue %(queue)s is reached, over all pollers: %(use)s.")
    return Explanation(use.reached, text % {**facts, "setting": use.reached, "use": use}, facts)


def _limited(case: _Case) -> Explanation | None:
    """Return that each poller holds as many tasks of the queue, or of the processor, as the limit allows."""
    task, made = case.task, registry.find(case.task.queue, case.task.payload_type)
    limits: list[tuple[int, list[str] | None]] = []
    if case.settings is not None and case.settings.concurrency is not None:
        limits.append((case.settings.concurrency, None))
    if made is not None and made.concurrency is not None:
        limits.append((made.concurrency * (made.batch or 1), registry.types_of(task.queue, (made,))))
    for limit, types in limits:
        held = case.held(types)
        if all(held[one.instance] >= limit for one in case.able):
            text = _("Each poller that may take the task holds as many as the concurrency allows: %(limit)s.")
            facts = {"limit": limit, "pollers": len(case.able)}
            return Explanation("concurrency", text % facts, facts)
    return None


def _busy(case: _Case) -> Explanation | None:
    if not all(one.slots and one.held >= one.slots for one in case.able):
        return None
    facts = {"pollers": len(case.able), "slots": sum(one.slots for one in case.able), **_numbers(case.position)}
    text = _("Each poller that may take the task is busy: %(slots)s slots are full.")
    return Explanation("busy", f"{text % facts} {_turn(case)}".strip(), facts)


def _waiting(case: _Case) -> Explanation:
    task, facts = case.task, _numbers(case.position)
    if case.lapsed:
        text = _("The lease of %(poller)s ran out %(time)s ago: the next checkout takes the task over.") % {
            "poller": task.poller_instance or "?", "time": _span(case.now, task.next_process_time),
        }  # fmt: skip
        facts |= {"poller": task.poller_instance, "until": task.next_process_time}
        return Explanation("lease_expired", text, facts)
    text = _("The task has been due for %(time)s.") % {"time": _span(case.now, task.next_process_time)}
    return Explanation("waiting", f"{text} {_turn(case)}".strip(), {"due": task.next_process_time, **facts})


REASONS: tuple[Callable[[_Case], Explanation | None], ...] = (
    _leased, _expired, _out_of_attempts, _parked, _paused, _unserved, _without_processor, _without_tag, _idle_pollers,
    _stopped, _behind_head, _not_due, _over_limit, _limited, _busy, _waiting,
)  # fmt: skip


def _numbers(found: ReadyPosition | None) -> dict[str, object]:
    if found is None:
        return {}
    exact = found.position.exact and found.waiting.exact
    return {"position": found.position.number, "waiting": found.waiting.number, "exact": exact}


def _turn(case: _Case) -> str:
    found = case.position
    text = _("It is number %(position)s of %(waiting)s waiting tasks, by priority and then the oldest first.")
    return text % {"position": found.position, "waiting": found.waiting} if found else ""


def _span(now: datetime, time: datetime | None) -> str:
    return "?" if time is None else format_duration(abs(now - time), rough=True)
