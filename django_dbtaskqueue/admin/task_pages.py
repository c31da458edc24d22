"""Tasks: the list, the page of one task, and what can be done to them."""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import cached_property, lru_cache
from typing import Any, cast

from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.models import F, QuerySet
from django.db.models.functions import Coalesce, Now
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.html import format_html
from django.utils.translation import gettext as _, gettext_lazy, ngettext

from django_dbtaskqueue.admin import cells, list_pages
from django_dbtaskqueue.admin.frame import address_here, may_see, permitted, viewer
from django_dbtaskqueue.admin.page_actions import TaskPageAdmin
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.columns import LONG, SHOWN_IF_SET
from django_dbtaskqueue.core.context import shown_database
from django_dbtaskqueue.core.durations import format_age, format_duration
from django_dbtaskqueue.core.exceptions import OperationRefused
from django_dbtaskqueue.core.json import whole_number
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db.session import alias_for, row_key
from django_dbtaskqueue.flow.placement import known_queues, own_fields
from django_dbtaskqueue.models import Attempt, AuditEntry, Batch, Poller, SavedSearch, Step, Task
from django_dbtaskqueue.models.querysets import TaskQuerySet
from django_dbtaskqueue.models.readable import as_list
from django_dbtaskqueue.models.tasks import SLEEP, WAIT, TemporaryTask
from django_dbtaskqueue.operations import permissions
from django_dbtaskqueue.operations.actions import actions_on
from django_dbtaskqueue.operations.bounded_reads import NONE_COUNTED, ApproxCount, queue_counts, queue_names
from django_dbtaskqueue.operations.explain import explain
from django_dbtaskqueue.operations.lookup import Location, elsewhere
from django_dbtaskqueue.operations.related_tasks import awaited, related, steps_of
from django_dbtaskqueue.operations.search import QUALIFIERS, Search, parse, query, text_of, to_text
from django_dbtaskqueue.operations.search.query import Page, TaskFilter, id_range, within
from django_dbtaskqueue.operations.search.values import STATE_NAMES
from django_dbtaskqueue.operations.serializers import error_of, is_storable, message_of, short_error
from django_dbtaskqueue.operations.verbs import EDIT, SEND_SIGNAL, TASK_VERBS

MAX_ROWS_OF_TABS = 2000  # that the numbers of the status tabs count in each status
MAX_SAVED_SEARCHES = 100  # of a user, and shared ones on a page
MAX_SEARCH_NAME_LENGTH = 100
SEARCH_EXAMPLES = (
    "status:ERROR", "is:stale", "queue:claims age:>10m", "error:Timeout", "attempt:>=3", "payload.carrier:UA",
    "-queue:bulk",
)  # fmt: skip
TOOK = Coalesce("finish_time", Now()) - F("start_time")
SORTS: dict[str, tuple[permissions.Text, tuple[Any, ...]]] = {
    "oldest": (gettext_lazy("oldest first"), ("pk",)),
    "wait": (gettext_lazy("longest waiting first"), (F("ready_time").asc(nulls_last=True), "pk")),
    "run": (gettext_lazy("slowest first"), (TOOK.desc(nulls_last=True), "-pk")),
    "attempts": (gettext_lazy("most attempts first"), ("-total_attempt", "-pk")),
}


class TaskPageFilter(TaskFilter):
    @property
    def place(self) -> Location:
        return self.queryset.db, self.queryset.model._meta.concrete_model

    @cached_property
    def ids(self) -> range | None:
        """The ids of the dates of the search, unless everything is searched."""
        whole = list_pages.FULL_SEARCH_KEY in self.request.GET or not self.is_valid()
        return None if whole else id_range(self.search, self.queryset)

    @cached_property
    def numbers(self) -> dict[str, ApproxCount]:
        """How many tasks of the queue are in each status; empty if the search has other terms: it finds fewer."""
        queues, actor = self.search.queues(), viewer(self.request)
        for term in self.search.terms:
            named = term.name == "queue" and not term.negated and tuple(one.value for one in term.matches) == queues
            if term.name != "status" and not named:
                return {}
        only = list(filter(actor.sees, queues)) if queues else actor.visible_queues
        counts = queue_counts(self.place, only, MAX_ROWS_OF_TABS).values()
        return {status: sum((one.statuses[status] for one in counts), NONE_COUNTED) for status in map(str, Status)}


def pickers(page: TaskPageAdmin, filterset: TaskPageFilter) -> dict[str, object]:
    """Return tabs of the statuses with their numbers, the queues to choose from, and the orders."""
    request, search = filterset.request, filterset.search
    queues, actor = search.queues(), viewer(request)
    found = statuses_of(search)
    every = len(found) == len(Status)
    tabs = [(_("All"), _of_status(search, None, request.path), "", every)]
    for status in map(str, Status):
        number = str(filterset.numbers.get(status, ""))
        tabs.append((status, _of_status(search, status, request.path), number, found == {status} and not every))
    names = sorted(filter(actor.sees, {*known_queues(), *queue_names(filterset.place), *queues}))
    few, order = names[: list_pages.MAX_QUEUES_TO_PICK], request.GET.get(list_pages.SORT_KEY, "")
    # What the search box completes: the qualifiers under "", the values of a qualifier under its name.
    begins = [f"{name}:" for name in QUALIFIERS if name] + [f"{name}." for name in LONG]
    words = {"": begins, "status": [*map(str, Status)], "is": list(STATE_NAMES)}
    return {
        "tabs": [] if page.base_search else tabs,
        "picks": [
            _pick("queue", _("Queue"), names if few == names else [], search),
            _pick("is", _("State"), STATE_NAMES, search),
        ],
        "sorts": [(key, label, key == order) for key, (label, _by) in SORTS.items()],
        "words": json.dumps(words | {"queue": [text_of(queue=name).partition(":")[2] for name in few]}),
    }


def _pick(name: str, label: str, values: Sequence[str], search: Search) -> tuple[str, str, list[tuple[str, str, bool]]]:
    """Return the values of a qualifier to choose from, as the address has them and as people read them."""
    terms = {value: text_of(**{name: value}) for value in values}
    chosen = {term.text for term in search.terms}
    return name, label, [(text.partition(":")[2], value, text in chosen) for value, text in terms.items()]


def statuses_of(search: Search) -> set[str]:
    found = {str(status) for status in Status}
    for term in search.terms:
        if term.name == "status":
            named = {match.value for match in term.matches}
            found = found - named if term.negated else found & named
    return found


def _of_status(search: Search, status: str | None, path: str) -> str:
    rest = Search(tuple(term for term in search.terms if term.name != "status"))
    return _address(parse(f"status:{status}") & rest if status else rest, path)


def _address(search: Search, path: str) -> str:
    return address_here(path, **{"q": to_text(search)} if search else {})


def search_context(filterset: Any, path: str) -> dict[str, Any]:
    search: Search = filterset.search
    picked = {text_of(**{"is": state}) for state in STATE_NAMES}  # what the pickers show is not in the text
    picked |= {text_of(queue=queue) for queue in search.queues()}
    shown = Search(tuple(term for term in search.terms if term.text not in picked))
    return {
        "text": to_text(shown) if search else filterset.data.get("q", ""),
        "chips": [
            (term.text, _address(Search(tuple(one for one in search.terms if one is not term)), path))
            for term in search.terms
        ],
        "errors": [error for errors in filterset.errors.values() for error in errors],
        "examples": [{"text": text, "query": address_here("", q=text)} for text in SEARCH_EXAMPLES],
        "qualifiers": QUALIFIERS.values(),
    }


def change_saved_searches(page: TaskPageAdmin, request: HttpRequest) -> HttpResponse:
    mine = SavedSearch.objects.using(alias_for("", None)).filter(owner=request.user.get_username())
    if "forget_view" in request.POST:
        mine.filter(pk=whole_number(request.POST["forget_view"]) or 0).delete()
        return redirect(request.get_full_path())
    name = request.POST.get("view_name", "").replace("\0", "").strip()[:MAX_SEARCH_NAME_LENGTH]
    search = page.search_of(request)
    if not name or not search:
        raise OperationRefused(_("Give a search and a name for it."))
    if mine.count() >= MAX_SAVED_SEARCHES and not mine.filter(name=name).exists():
        raise OperationRefused(_("You have %(most)s saved searches. Delete one first.") % {"most": MAX_SAVED_SEARCHES})
    given = {"query": to_text(search), "shared": request.POST.get("view_shared") == "1"}
    mine.update_or_create(owner=request.user.get_username(), name=name, defaults=given)
    return page.reply(request, _("Saved as %(name)s.") % {"name": name})


MAX_TIMELINE_ATTEMPTS = 50
MAX_TIMELINE_MESSAGE = 300  # characters
_text_of_queue = lru_cache(maxsize=1000)(lambda name: text_of(queue=name))
Event = dict[str, Any]  # of a task, in the past or in the future


def _event(time: datetime, what: str, note: str = "", **more: object) -> Event:
    """``bad``: something failed. ``acted``: an operator did it, which ``url`` shows."""
    return {"time": time, "shown": cells.stamp(time), "what": what, "note": note, **more}


class TaskAdmin(TaskPageAdmin):
    detail_template = "task"
    row_keys = ("again",)
    list_template = "tasks"
    list_across = waits_for_tick = True
    filterset = TaskPageFilter
    list_display = (
        "id", "status_badge", "reference", "queue_link", "attempts", "says", "waited", "took", "when", "created"
    )  # fmt: skip
    list_display_links = ("id", "reference")
    long_columns = ("payload", "result", "context")
    secrets = ("process_result_box", "payload_box", "result_box", "context_box")
    empty = gettext_lazy("No task matches.")

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Show temporary tasks in the index only where a queue has them, as far as the settings can be read."""
        used = self.model is not TemporaryTask
        with suppress(ImproperlyConfigured):
            used = used or any(conf.default_settings(name).temporary for name in ("", *conf.settings_queues()))
        return used and super().has_module_permission(request)

    def list_verbs(self, request: HttpRequest) -> Sequence[permissions.Verb]:
        statuses = statuses_of(self.base_search & self.filtered(request).search)
        return permitted(request, [verb for verb in TASK_VERBS.values() if statuses & set(verb.sources)])

    def act(self, request: HttpRequest) -> HttpResponse:
        if {"save_view", "forget_view"} & request.POST.keys():
            return change_saved_searches(self, request)
        return super().act(request)

    def list_context(self, request: HttpRequest) -> dict[str, Any]:
        context = super().list_context(request)
        filterset = context["filterset"]
        if (ids := filterset.ids) is not None:
            text = _("Tasks created then have ids from %(first)s to %(last)s; only these were searched.")
            context["of_ids"] = text % {"first": cells.number(ids.start), "last": cells.number(ids.stop - 1)}
            context["empty"] = _("No task with such an id matches.")
        context["elsewhere"] = elsewhere(filterset.search.queues(), filterset.queryset)
        actor, saved = viewer(request), SavedSearch.objects.using(self.get_queryset(request).db).order_by("name", "pk")
        own = saved.filter(owner=actor.name)[:MAX_SAVED_SEARCHES]
        shared = permissions.narrow(saved.filter(shared=True).exclude(owner=actor.name), actor)[:MAX_SAVED_SEARCHES]
        context["saved"] = [
            {"pk": row.pk, "name": row.name, "own": row.owner == actor.name, "query": address_here("", q=row.query)}
            for row in (*own, *shared)
        ]
        return context | pickers(self, filterset) | search_context(filterset, request.path)

    def read_page(self, request: HttpRequest, filterset: Any, rows: QuerySet[Any], **place: int | None) -> Page:
        search, size = filterset.search, list_pages.PAGE_ROWS
        effort = list_pages.search_effort(request)
        if not effort and query.finds_processing_only(search) and connections[rows.db].vendor == "postgresql":
            return query.page_of_processing(cast(TaskQuerySet, rows), search.queues(), size, **place)
        among = within(filterset.ids, query.indexed_part(search, filterset.queryset))
        if order := SORTS.get(request.GET.get(list_pages.SORT_KEY, "")):
            return query.sorted_page(rows, among, size, order[1])
        return query.page_of(rows, among, size, before=place["before"], after=place["after"], **effort)

    def count(self, rows: QuerySet[Any], found: Page, place: int | None, filterset: Any) -> ApproxCount | None:
        """Return how many tasks match, and let the tabs of the same tasks show the same number."""
        count = super().count(rows, found, place, filterset)
        statuses, numbers = statuses_of(self.base_search & filterset.search), filterset.numbers
        if not numbers:
            return count
        if count is None or not count.exact:
            return sum((numbers[status] for status in statuses), NONE_COUNTED)
        numbers |= dict.fromkeys(statuses, count) if len(statuses) == 1 else {}
        return count

    def rows_of(self, filterset: Any) -> TaskQuerySet:
        return within(filterset.ids, cast(TaskQuerySet, super().rows_of(filterset)))

    @admin.display(description=gettext_lazy("queue"))
    def queue_link(self, task: Any) -> str:
        return self.link(cells.own_text(task.queue), self.url(self.model, "changelist", q=_text_of_queue(task.queue)))

    @admin.display(description=gettext_lazy("when"))
    def when(self, task: Any) -> str:
        if task.parked_by:
            return _("parked")
        if task.status == Status.CREATED:
            return _within(_("due %(time)s"), cells.ago(task.next_process_time, task.clock))
        if task.status == Status.PROCESSING:
            words = _("lease ran out %(time)s") if task.next_process_time <= task.clock else _("lease ends %(time)s")
            return _within(words, cells.ago(task.next_process_time, task.clock))
        return _within(_("finished %(time)s"), cells.ago(task.finish_time or task.last_update_time, task.clock))

    says = cells.column(gettext_lazy("progress or error"), cells.line_of)
    waited = cells.column(gettext_lazy("waited"), lambda task: format_age(_waited(task)))
    took = cells.column(gettext_lazy("took"), lambda task: format_age(_took(task)))

    situation = cells.column(gettext_lazy("now"), lambda task: explain(task).sentence)

    @admin.display(description=gettext_lazy("poller"))
    def poller(self, task: Any) -> str:
        if not task.poller_instance:
            return cells.EMPTY_VALUE
        known = Poller.objects.using(task._state.db).filter(pk=task.poller_instance).exists()
        return self.link(task.poller_instance, self.url(Poller, "change", task.poller_instance) if known else "")

    @admin.display(description=gettext_lazy("attempts"))
    def attempts_made(self, task: Any) -> str:
        total, requeued = task.total_attempt, task.reenqueue_attempt
        words = [_("%(attempt)s of %(most)s") % {"attempt": task.attempt, "most": task.max_attempts}]
        if total:
            words.append(ngettext("taken once", "taken %(count)s times", total) % {"count": total})
        if requeued:
            words.append(ngettext("requeued once", "requeued %(count)s times", requeued) % {"count": requeued})
        return ", ".join(words)

    def page_fields(self, row: Any) -> Sequence[str]:
        filled = [name for name in SHOWN_IF_SET if getattr(row, name)]
        names = (
            "status_badge", "situation", "queue_link", "reference", "attempts_made", "waited", "took", "poller",
            "priority",
        )  # fmt: skip
        return (*names, *filled, *own_fields(row._meta.model), *(["group_link"] if row.fingerprint else []))

    @admin.display(description=gettext_lazy("batch"))
    def batch(self, task: Any) -> str:
        return self.link(task.batch, self.url(Batch, "change", row_key(task, task.batch)))

    @admin.display(description=gettext_lazy("failure group"))
    def group_link(self, task: Any) -> str:
        query = text_of(fingerprint=task.fingerprint)
        return self.link(_("Tasks that failed for the same reason"), self.url(self.model, "changelist", q=query))

    def page_verbs(self, request: HttpRequest, row: Any) -> Sequence[permissions.Verb]:
        verbs = [*TASK_VERBS.values()]
        verbs[-1:-1] = [EDIT] if may_see(request, row) else []
        return permitted(request, [verb for verb in verbs if row.status in verb.sources], row.queue)

    def page_facts(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        seen = may_see(request, row)
        events = [*timeline(row, traces=seen), *self._actions(row, viewer(request))]
        return {
            "events": sorted(events, key=lambda event: (event["time"], "bad" not in event)),
            "may_enqueue": seen and bool(permitted(request, [permissions.ENQUEUE_COPY], row.queue)),
            "log_url": self.url(self.model, "history", row.pk) if self._is_logged(row.pk) else "",
            "related": [
                (_("Waits for"), *self._related(row, "parent", viewer(request))),
                (_("Then runs"), *self._related(row, "child", viewer(request))),
            ],
            "steps": [
                (step, step.get_kind_display(), cells.stamp(step.create_time), self._step_note(step, seen=seen))
                for step in steps_of(row)
            ],
            "awaited": (wait := awaited(row)),
            "choices": [(json.dumps(one), one) for one in as_list(wait and wait.result)],
            "may_signal": permitted(request, [SEND_SIGNAL], row.queue),
        }

    def _related(self, task: Any, there: str, actor: permissions.Actor) -> tuple[list[Any], int]:
        found, more = related(task, there, actor)
        rows = [(one, self.task_url(one.location, one.id), cells.status_badge(one.status or "?")) for one in found]
        return rows, more

    def _step_note(self, step: Step, *, seen: bool) -> str:
        """Return until when a step lasts, or its result to users who may see results."""
        if step.kind in (SLEEP, WAIT):
            return "" if step.until_time is None else _within(_("until %(time)s"), cells.stamp(step.until_time))
        return cells.json_box(step.result) if seen and step.result is not None else ""

    def _actions(self, task: Any, actor: permissions.Actor) -> Iterator[Event]:
        """Yield what operators did to the task, also in bulk operations; of a hidden audit entry without its reason."""
        for change in actions_on(task):
            entry = change.audit
            what = entry.details.get("action") or permissions.label_of(entry.verb)
            note = _("by %(who)s via %(source)s") % {"who": entry.actor, "source": entry.source}
            seen = permissions.sees_record(entry, actor)
            note += f": {entry.reason}" if entry.reason and seen else ""
            url = self.url(AuditEntry, "change", entry.pk) if seen else ""
            yield _event(change.time, str(what), note, url=url, acted=True)

    def history_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> HttpResponse:
        """Return the log of Django's admin, or the task's own page where that log has no entry of the task."""
        if is_storable(object_id) and self._is_logged(object_id):
            return super().history_view(request, object_id, extra_context)
        return self.change_view(request, object_id)

    def _is_logged(self, pk: int | str) -> bool:
        kind = ContentType.objects.get_for_model(self.model)
        return not shown_database.get() and LogEntry.objects.filter(content_type=kind, object_id=str(pk)).exists()


class PoisonTaskAdmin(TaskAdmin):
    base_search = parse("status:POISON")
    empty = gettext_lazy("No task is in POISON.")
    plural = gettext_lazy("poison tasks")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).filter(final_status=Status.POISON)

    def page_of(self, row: Any) -> str:
        return self.url(Task, "change", row.pk)


def timeline(task: Any, *, traces: bool) -> list[Event]:
    """Return the known events of a task, past and future, in no order, and its last failed attempts."""
    attempts = Attempt.objects.using(task._state.db).filter(location=task._meta.label_lower, task_id=task.pk)
    failed = list(attempts.order_by("-total_attempt")[:MAX_TIMELINE_ATTEMPTS])
    known: list[tuple[datetime | None, Any, str]] = [
        (task.create_time, _("created"), ""),
        (task.ready_time if task.status == Status.CREATED else None, _("ready from"), ""),
        (task.start_time, _("last checked out"), task.poller_instance or ""),
        (task.next_process_time if task.status == Status.PROCESSING else None, _("lease ends"), ""),
        (task.finish_time, _("finished"), task.status),
        (task.expire_time, _("expires"), ""),
    ]
    events = [_event(time, what, note) for time, what, note in known if time is not None]
    if task.finish_time and task.start_time and not failed:
        took = _("after %(time)s") % {"time": format_age(_took(task))}
        events = [{**one, "took": took} if one["time"] == task.finish_time else one for one in events]
    return events + [_failure(row, traces=traces) for row in failed]


def _failure(row: Attempt, *, traces: bool) -> Event:
    what, note = _("attempt %(n)s failed") % {"n": row.attempt}, short_error(error_of(row))
    event = _event(row.finish_time, what, message_of(note, MAX_TIMELINE_MESSAGE), bad=True, key=row.total_attempt)
    if row.start_time:
        event["took"] = _("after %(time)s") % {"time": format_duration(row.finish_time - row.start_time, rough=True)}
    return {**event, "trace": cells.box(row.traceback) if traces and row.traceback else ""}


def _waited(task: Any) -> timedelta | None:
    """Return how long a task waited, or has been waiting, for its checkout; None when the row does not tell."""
    if task.ready_time and task.status == Status.CREATED:
        waits: timedelta = task.clock - task.ready_time
        return waits if waits >= timedelta(0) else None
    if task.ready_time and task.start_time:
        return cast(timedelta, task.start_time - task.ready_time)
    if task.start_time and task.total_attempt == 1:
        return cast(timedelta, task.start_time - task.create_time)
    return None


def _took(task: Any) -> timedelta | None:
    """Return the time from the last checkout to the stored result, or until now. Both happen in batches."""
    end = task.clock if task.status == Status.PROCESSING else task.finish_time
    return end - task.start_time if end and task.start_time else None


def _within(words: str, time: str) -> str:
    before, _placeholder, after = words.partition("%(time)s")
    return format_html("{}{}{}", before, time, after)
