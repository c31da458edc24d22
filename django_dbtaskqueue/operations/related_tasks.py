"""What a task did in its steps, what it waits for, what waits for it; batches and their graphs. Reads are bounded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Annotated

from django.db.models import Q, QuerySet
from django.db.models.functions import Now
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext, ngettext_lazy

from django_dbtaskqueue.core.durations import format_duration
from django_dbtaskqueue.core.outcomes import SIGNAL
from django_dbtaskqueue.core.states import ERROR, TERMINAL, Status
from django_dbtaskqueue.db.session import model_for
from django_dbtaskqueue.flow.batches import BatchHandle, counts_of
from django_dbtaskqueue.flow.dependencies import TaskKey, rows_of
from django_dbtaskqueue.models import AbstractTask, Batch, Dependency, Step
from django_dbtaskqueue.models.tasks import SENT, SLEEP, WAIT
from django_dbtaskqueue.operations.actions import record, recorded
from django_dbtaskqueue.operations.lookup import locations
from django_dbtaskqueue.operations.permissions import Actor, Verb, all_queues, check, narrow, sole
from django_dbtaskqueue.operations.serializers import Document, RowDocument

MAX_RELATED_SHOWN = 50  # parents, and children, on the page of a task
MAX_PARENTS_NAMED = 3  # in the sentence that says what a task waits for
COUNTED_RELATED = 10_000  # how far parents and children are counted
MAX_STEPS_SHOWN = 200  # the last ones
MAX_NODES_DRAWN = 500  # of a larger batch the page shows the list alone
MAX_EDGES_DRAWN = 3000
SWEEPS = 4  # passes that put tasks near their parents, then near their children
NODE_WIDTH, NODE_HEIGHT, GAP_X, GAP_Y, MARGIN = 168, 40, 24, 44, 8  # pixels
MAX_NODES_IN_ROW = 10
MAX_LABEL = 22  # characters in a node
Wait = tuple[TaskKey, TaskKey, bool]  # parent, child, whether the child still waits
ROUNDING = timedelta(seconds=1)  # the step and the task took their times from two statements


@dataclass(frozen=True, slots=True)
class RelatedTask:
    """A parent or a child. ``status`` is "" for one that is gone; ``queue`` is "" for one of a hidden queue."""

    location: str
    id: int
    name: str
    queue: str
    reference: str | None
    status: str
    open: bool  # the child still waits for the parent


@dataclass(frozen=True, slots=True)
class RelatedTasks:
    """The first parents or children of a task, and how many there are: counted no further than 10,000."""

    tasks: Sequence[RelatedTask]
    number: int

    @property
    def more(self) -> int:
        """How many are not among ``tasks``."""
        return self.number - len(self.tasks)


def waits_for(task: AbstractTask, alias: str) -> tuple[str, Mapping[str, object]]:
    """Return what a held task waits for, as a sentence and as facts."""
    edges = _edges(task, alias, "child").filter(outcome__isnull=True)
    found = _read(edges.order_by("pk")[:MAX_PARENTS_NAMED], alias, "parent", None)
    number = edges[:COUNTED_RELATED].count()
    facts = {"parents": {str(one.id): one.status or "?" for one in found}, "number": number}
    if not found:
        return _(
            "The task waits for a parent that was deleted. Cancel it; then Kick runs it without its parents."
        ), facts
    named = ", ".join(f"{one.id} ({one.status or '?'})" for one in found)
    if number > len(found):
        named = _("%(named)s and %(more)s more") % {"named": named, "more": f"{number - len(found):,}"}
    text = ngettext("The task waits for task %(named)s.", "The task waits for tasks %(named)s.", number)
    text %= {"named": named}
    if any(one.status in TERMINAL for one in found):
        text += " " + _("A parent that failed has to complete after all: reprocess it.")
    return text, facts


def parents_of(task: AbstractTask, actor: Actor) -> RelatedTasks:
    """Return what a task waits for, or waited for."""
    return _related(task, "child", "parent", actor)


def children_of(task: AbstractTask, actor: Actor) -> RelatedTasks:
    """Return what waits for a task, or waited for it."""
    return _related(task, "parent", "child", actor)


def _related(task: AbstractTask, here: str, there: str, actor: Actor) -> RelatedTasks:
    alias = str(task._state.db)
    edges = _edges(task, alias, here)
    found = _read(edges.order_by("pk")[:MAX_RELATED_SHOWN], alias, there, actor)
    number = edges[:COUNTED_RELATED].count() if len(found) == MAX_RELATED_SHOWN else len(found)
    return RelatedTasks(found, number)


def _edges(task: AbstractTask, alias: str, here: str) -> QuerySet[Dependency]:
    of = {f"{here}_location": task._meta.label_lower, f"{here}_id": task.pk}
    return Dependency.objects.using(alias).filter(**of)


def _read(edges: QuerySet[Dependency], alias: str, there: str, actor: Actor | None) -> list[RelatedTask]:
    pairs = [(TaskKey(getattr(one, f"{there}_location"), getattr(one, f"{there}_id")), one) for one in edges]
    rows = rows_of({key for key, _edge in pairs}, alias)
    found = []
    for key, edge in pairs:
        queue, reference, status, _result = rows.get(key, ("", None, "", None))
        hidden = actor is not None and queue and not actor.sees(queue)
        name = edge.name if there == "parent" and not hidden else ""
        shown = ("", None) if hidden else (queue, reference)
        found.append(RelatedTask(*key, name, *shown, status, edge.outcome is None))
    return found


# -- steps -------------------------------------------------------------------------------------------------------------


def steps_of(task: AbstractTask) -> list[Step]:
    """Return the last steps of a task, in their order."""
    return list(_newest_first(task)[:MAX_STEPS_SHOWN])[::-1]


def awaited(task: AbstractTask) -> Step | None:
    """Return the wait for a signal that a task, which has not ended, has begun; None if it waits for none."""
    last = _last(task)
    return last if last is not None and last.kind == WAIT else None


def suspension(task: AbstractTask, now: datetime) -> tuple[str, str, dict[str, object]] | None:
    """Return why a waiting task sleeps or waits for a signal, as a code, a sentence and facts; None if it does not."""
    last = _last(task) if task.status == Status.CREATED and task.total_attempt else None
    if last is None:
        return None
    until = last.until_time
    left = None if until is None else format_duration(max(until, now) - now, rough=True)
    if until is not None and until <= now:
        return None
    if last.kind == SLEEP:
        text = _("The task sleeps. It goes on in %(left)s.") % {"left": left}
        return "sleeping", text, {"until": until}
    facts = {"signal": last.name, "since": last.create_time, "until": until}
    text = _("The task has waited for the signal %(signal)s for %(time)s.")
    if until is not None:
        text = _("The task has waited for the signal %(signal)s for %(time)s. Without it, it goes on in %(left)s.")
    words = {"signal": last.name, "time": format_duration(now - last.create_time, rough=True), "left": left}
    return "signal", text % words, facts


def _last(task: AbstractTask) -> Step | None:
    if task.status not in (Status.CREATED, Status.PROCESSING):
        return None
    last = _newest_first(task).first()
    return last if last is not None and last.kind in (SLEEP, WAIT) and _lasts(task, last) else None


def _newest_first(task: AbstractTask) -> QuerySet[Step]:
    rows = Step.objects.using(task._state.db).filter(location=task._meta.label_lower, task_id=task.pk)
    return rows.exclude(kind=SENT).order_by("-position")


def _lasts(task: AbstractTask, step: Step) -> bool:
    """Whether a sleep or a wait still lasts, but for its time: a signal, or an operator, makes the task due."""
    if task.status != Status.CREATED or task.parked_by == SIGNAL:
        return True
    return step.until_time is not None and task.next_process_time > step.until_time - ROUNDING


# -- batches -----------------------------------------------------------------------------------------------------------

MAX_BATCHES_LISTED = 500
MAX_ID_DIGITS = 18  # of an id that a column can hold
CANCEL_BATCH = Verb(
    "cancel_batch", gettext_lazy("Cancel all"),
    gettext_lazy("All tasks of the batch that wait or run end in POISON. The task that runs at its end still runs."),
    ngettext_lazy("%(number)s task cancelled", "%(number)s tasks cancelled", "number"), "cancel_task",
)  # fmt: skip
RETRY_BATCH = Verb(
    "retry_batch", gettext_lazy("Retry failed"),
    gettext_lazy("Tasks in ERROR run again. Tasks that were cancelled because one of them failed wait for it again."),
    ngettext_lazy("%(number)s task reprocessed", "%(number)s tasks reprocessed", "number"), "reprocess_task",
)  # fmt: skip
BATCH_VERBS: Mapping[str, Verb] = {verb.name: verb for verb in (CANCEL_BATCH, RETRY_BATCH)}
BATCH = RowDocument(
    "Batch", "A batch, and how many of its tasks are in each status.", Batch,
    ("id", "name", "create_time", "total", "queues", "callback_id"), {"statuses": dict[str, int]},
)  # fmt: skip
BatchDocument = Annotated[Document, BATCH]


def listed_batches(actor: Actor, using: str | None = None) -> list[Batch]:
    """Return the newest batches that the actor may view, of every database."""
    found: list[Batch] = []
    for alias in sorted({alias for alias, _model in locations(using)}):
        found += _rows(alias, actor).order_by("-pk")[:MAX_BATCHES_LISTED]
    return sorted(found, key=lambda row: row.create_time, reverse=True)[:MAX_BATCHES_LISTED]


def find_batch(pk: str, actor: Actor, using: str | None = None) -> Batch | None:
    """Return a batch by its id, if it is there and the actor may view it."""
    if not pk.isascii() or not pk.isdecimal() or len(pk) > MAX_ID_DIGITS:
        return None
    for alias in sorted({alias for alias, _model in locations(using)}):
        row = _rows(alias, actor, pk=int(pk)).first()
        if row is not None:
            return row
    return None


def _rows(alias: str, actor: Actor, **of: int) -> QuerySet[Batch]:
    """Return batches with the time of their database as ``clock``."""
    return narrow(Batch.objects.using(alias).filter(**of).order_by("-pk").annotate(clock=Now()), actor)


def batch_documents(rows: list[Batch]) -> list[BatchDocument]:
    """Return batches as data: one query for each of their task tables."""
    counts = counts_of(rows)
    return [BATCH.of(row, statuses={str(status): counts[row.pk][str(status)] for status in Status}) for row in rows]


def act_on_batch(verb: Verb, row: Batch, actor: Actor, *, reason: str = "") -> int:
    """Cancel all tasks of a batch, or go on from where it failed; return how many tasks changed, and record it.

    Raises ``PermissionDenied`` unless the actor may use the verb on each queue of the batch. A task that was moved to
    another queue since stays as it is if the actor may not use the verb there.
    """
    check(verb, reason, actor)
    for queue in row.queues:
        check(verb, reason, actor, queue)
    alias, handle = str(row._state.db), BatchHandle.of(row)
    handle.queues = None if actor.user is None else [queue for queue in all_queues() if actor.may(verb, queue)]
    with recorded(alias):
        changed = handle.cancel() if verb == CANCEL_BATCH else handle.retry()
        given = {"queue": sole(row.queues), "details": {"batch": row.pk, "name": row.name}}
        record(alias, actor, verb, reason=reason, changed=changed, **given)
    return changed


def fits(verb: Verb, counts: Mapping[str, int]) -> bool:
    """Whether a verb would change a batch with these counts."""
    if verb == CANCEL_BATCH:
        return bool(counts[str(Status.CREATED)] or counts[str(Status.PROCESSING)])
    return bool(counts[str(ERROR)])


# -- the graph of a batch: which task waits for which, in layers, as places on a page ----------------------------------


@dataclass(slots=True)
class Node:
    """A task of the graph. ``x`` and ``y`` are the upper left corner of its box."""

    key: TaskKey
    label: str  # for the box
    name: str  # for the table, where others call it by its id
    title: str
    status: str
    layer: int = 0
    x: float = 0.0
    y: float = 0.0


@dataclass(frozen=True, slots=True)
class Line:
    """A wait: from the lower side of the parent to the upper side of the child."""

    x1: float
    y1: float
    x2: float
    y2: float
    open: bool

    @property
    def path(self) -> str:
        """The line as the data of an SVG path: a curve that leaves and arrives upright."""
        middle = (self.y1 + self.y2) / 2
        return f"M{self.x1:g},{self.y1:g} C{self.x1:g},{middle:g} {self.x2:g},{middle:g} {self.x2:g},{self.y2:g}"


@dataclass(slots=True)
class Graph:
    """The tasks of a batch and their waits, placed. ``too_large``: only the first tasks are here, without places."""

    nodes: list[Node] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    parents: dict[TaskKey, list[TaskKey]] = field(default_factory=dict)
    width: float = 0.0
    height: float = 0.0
    too_large: bool = False


def graph_of(row: Batch, actor: Actor) -> Graph:
    """Return the graph of a batch: its tasks and its callback, in at most three queries and one for each table."""
    alias = str(row._state.db)
    keys: list[TaskKey] = []
    for model in sorted({model_for(queue) for queue in row.queues}, key=lambda model: model._meta.label_lower):
        tasks = model._base_manager.using(alias).filter(batch=row.pk).order_by("pk")
        ids = tasks.values_list("pk", flat=True)[: MAX_NODES_DRAWN + 1]
        keys += [TaskKey(model._meta.label_lower, pk) for pk in ids]
    too_large = len(keys) > MAX_NODES_DRAWN
    keys = keys[:MAX_NODES_DRAWN]
    if row.callback_id is not None:
        keys.append(TaskKey(row.callback_location, row.callback_id))
    here = Q()
    for location in sorted({key.location for key in keys}):
        here |= Q(child_location=location, child_id__in=[key.id for key in keys if key.location == location])
    edges = Dependency.objects.using(alias).filter(here).order_by("pk")[: MAX_EDGES_DRAWN + 1] if keys else []
    waits = [
        (TaskKey(one.parent_location, one.parent_id), TaskKey(one.child_location, one.child_id), one.outcome is None)
        for one in edges
    ]
    too_large = too_large or len(waits) > MAX_EDGES_DRAWN
    known = {*keys}
    keys += [parent for parent in dict.fromkeys(parent for parent, _child, _open in waits) if parent not in known]
    rows = rows_of(set(keys), alias)
    nodes = []
    for key in keys:
        queue, reference, status, _result = rows.get(key, ("", None, "", None))
        seen = not queue or actor.sees(queue)
        nodes.append(_node(key, queue if seen else "", reference if seen else None, status))
    last = None if row.callback_id is None else TaskKey(row.callback_location, row.callback_id)
    return laid_out(nodes, waits, last=last, too_large=too_large)


def _node(key: TaskKey, queue: str, reference: str | None, status: str) -> Node:
    label = reference or f"{queue} {key.id}".strip()
    short = label if len(label) <= MAX_LABEL else f"{label[: MAX_LABEL - 1]}…"
    name = f"{key.id}: {reference}" if reference else label
    return Node(key, short, name, f"{queue}/{reference or key.id} {status}".strip("/ "), status)


def laid_out(
    nodes: Sequence[Node], waits: Iterable[Wait], *, last: TaskKey | None = None, too_large: bool = False
) -> Graph:
    """Return nodes in layers, each below all of its parents, and the lines between them.

    Inside a layer a node stands near the middle of its parents, then of its children: few lines cross. ``last`` waits
    for every task of the batch: it gets lines only from tasks without another child.
    """
    by_key = {node.key: node for node in nodes}
    lines = [(parent, child, is_open) for parent, child, is_open in waits if parent in by_key and child in by_key]
    parents: defaultdict[TaskKey, list[TaskKey]] = defaultdict(list)
    children: defaultdict[TaskKey, list[TaskKey]] = defaultdict(list)
    for parent, child, _open in lines:
        parents[child].append(parent)
        children[parent].append(child)
    graph = Graph([*nodes], parents=dict(parents), too_large=too_large)
    if too_large:
        return graph
    _set_layers(by_key, parents, children)
    layers: defaultdict[int, list[Node]] = defaultdict(list)
    for node in nodes:
        layers[node.layer].append(node)
    for sweep in range(SWEEPS):
        near, order = (parents, sorted(layers)) if sweep % 2 == 0 else (children, sorted(layers, reverse=True))
        for layer in order:
            _place(layers[layer], by_key, near)
    _set_places(graph, layers)
    half = NODE_WIDTH / 2
    for parent, child, is_open in lines:
        if child == last and len(children[parent]) > 1:
            continue
        above, below = by_key[parent], by_key[child]
        graph.lines.append(Line(above.x + half, above.y + NODE_HEIGHT, below.x + half, below.y, is_open))
    return graph


def _set_places(graph: Graph, layers: Mapping[int, list[Node]]) -> None:
    """Give each node its place. A wide layer is broken into rows, so that the page stays readable."""
    widest = min(max(map(len, layers.values()), default=0), MAX_NODES_IN_ROW)
    graph.width = 2 * MARGIN + widest * (NODE_WIDTH + GAP_X) - GAP_X
    y: float = MARGIN
    for layer in sorted(layers):
        for start in range(0, len(layers[layer]), MAX_NODES_IN_ROW):
            row = layers[layer][start : start + MAX_NODES_IN_ROW]
            left = (graph.width - len(row) * (NODE_WIDTH + GAP_X) + GAP_X) / 2
            for place, node in enumerate(row):
                node.x, node.y = left + place * (NODE_WIDTH + GAP_X), y
            y += NODE_HEIGHT + GAP_X
        y += GAP_Y - GAP_X
    graph.height = y - GAP_Y + MARGIN


def _set_layers(
    nodes: Mapping[TaskKey, Node],
    parents: Mapping[TaskKey, list[TaskKey]],
    children: Mapping[TaskKey, list[TaskKey]],
) -> None:
    """Give each node the number of the layer below its lowest parent."""
    left = {key: len(parents.get(key, ())) for key in nodes}
    free = [key for key, number in left.items() if not number]
    while free:
        key = free.pop()
        for child in children.get(key, ()):
            nodes[child].layer = max(nodes[child].layer, nodes[key].layer + 1)
            left[child] -= 1
            if not left[child]:
                free.append(child)


def _place(row: list[Node], nodes: Mapping[TaskKey, Node], near: Mapping[TaskKey, list[TaskKey]]) -> None:
    """Order a layer by the middle of what each node is joined to, as far as that has a place; set places from it."""
    middles = {
        node.key: sum(nodes[key].x for key in near[node.key]) / len(near[node.key]) if near.get(node.key) else node.x
        for node in row
    }
    row.sort(key=lambda node: middles[node.key])
    for place, node in enumerate(row):
        node.x = place - (len(row) - 1) / 2  # around a middle that all layers share
