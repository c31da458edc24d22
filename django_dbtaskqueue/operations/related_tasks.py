"""What a task did in its steps, what it waits for, what waits for it; batches and their graphs. Reads are bounded."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cache
from graphlib import CycleError, TopologicalSorter
from statistics import fmean
from typing import Annotated

from django.db.models import QuerySet
from django.db.models.functions import Now
from django.utils.translation import gettext as _, gettext_lazy, ngettext, ngettext_lazy

from django_dbtaskqueue.core.durations import format_duration
from django_dbtaskqueue.core.exceptions import TaskQueueError
from django_dbtaskqueue.core.states import SIGNAL, TERMINAL, Status
from django_dbtaskqueue.flow.batches import BatchHandle, counts_of
from django_dbtaskqueue.flow.dependencies import GONE_TASK, TaskKey, rows_of
from django_dbtaskqueue.models import AbstractTask, Batch, Dependency, Step
from django_dbtaskqueue.models.tasks import SENT, SLEEP, WAIT
from django_dbtaskqueue.operations.actions import record, recorded
from django_dbtaskqueue.operations.lookup import aliases_in, locations
from django_dbtaskqueue.operations.permissions import Actor, Verb, all_queues, by_name, check, narrow, sole
from django_dbtaskqueue.operations.serializers import BadInput, Document, RowDocument, whole

MAX_RELATED_SHOWN = 50  # parents, and children, on the page of a task
MAX_PARENTS_NAMED = 3  # in the sentence that says what a task waits for
COUNTED_RELATED = 10_000  # how far parents and children are counted
MAX_STEPS_SHOWN = 200  # the last ones
MAX_TASKS_DRAWN = 5000  # of a larger batch the page has links to the lists alone
MAX_EDGES_DRAWN = 20_000
SHOWN_OF_NODES = ("queue", "reference", "status")
MAX_BOXES = 30  # of more tasks those that are alike share one
MAX_FAILED_ALONE = 10  # failed tasks that keep a box of their own
DIGITS = re.compile(r"\d+")
NODE_WIDTH, NODE_HEIGHT, GAP_X, GAP_Y, MARGIN = 164, 40, 24, 44, 8  # pixels
MAX_NODES_IN_ROW = 7
Wait = tuple[TaskKey, TaskKey, bool]  # parent, child, whether the child still waits
Lines = dict[tuple[TaskKey, TaskKey], bool]  # the same between boxes
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


def waits_for(task: AbstractTask, alias: str) -> tuple[str, Mapping[str, object]]:
    """Return what a held task waits for, as a sentence and as facts."""
    edges = _edges(task, alias, "child").filter(outcome__isnull=True)
    found = _read(edges.order_by("pk")[:MAX_PARENTS_NAMED], alias, "parent", None)
    number = edges[:COUNTED_RELATED].count()
    facts = {"parents": {str(one.id): one.status or "?" for one in found}, "number": number}
    if not found:
        text = _("The task waits for a parent that was deleted. Cancel it; then Kick runs it without its parents.")
        return text, facts
    named = ", ".join(f"{one.id} ({one.status or '?'})" for one in found)
    if number > len(found):
        named = _("%(named)s and %(more)s more") % {"named": named, "more": f"{number - len(found):,}"}
    text = ngettext("The task waits for task %(named)s.", "The task waits for tasks %(named)s.", number)
    text %= {"named": named}
    if any(one.status in TERMINAL for one in found):
        text += " " + _("A parent that failed has to complete after all: reprocess it.")
    return text, facts


def related(task: AbstractTask, there: str, actor: Actor) -> tuple[list[RelatedTask], int]:
    """Return the first of what a task waits for ("parent"), or of what waits for it ("child"), and how many more."""
    alias = str(task._state.db)
    edges = _edges(task, alias, "child" if there == "parent" else "parent")
    found = _read(edges.order_by("pk")[:MAX_RELATED_SHOWN], alias, there, actor)
    number = edges[:COUNTED_RELATED].count() if len(found) == MAX_RELATED_SHOWN else len(found)
    return found, number - len(found)


def _edges(task: AbstractTask, alias: str, here: str) -> QuerySet[Dependency]:
    return Dependency.objects.using(alias).filter(**{f"{here}_location": task._meta.label_lower, f"{here}_id": task.pk})


def _read(edges: QuerySet[Dependency], alias: str, there: str, actor: Actor | None) -> list[RelatedTask]:
    pairs = [(TaskKey(getattr(one, f"{there}_location"), getattr(one, f"{there}_id")), one) for one in edges]
    rows = rows_of({key for key, _edge in pairs}, alias)
    found = []
    for key, edge in pairs:
        queue, reference, status, _result = rows.get(key, GONE_TASK)
        hidden = actor is not None and queue and not actor.sees(queue)
        name = edge.name if there == "parent" and not hidden else ""
        shown: tuple[str, str | None] = ("", None) if hidden else (queue, reference)
        found.append(RelatedTask(*key, name, *shown, status, edge.outcome is None))
    return found


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
    if last is None or (last.until_time is not None and last.until_time <= now):
        return None
    until = last.until_time
    left = None if until is None else format_duration(until - now, rough=True)
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
    """Return the sleep or wait that a task has begun, and that no signal, time or operator has ended."""
    if task.status not in (Status.CREATED, Status.PROCESSING):
        return None
    last = _newest_first(task).first()
    if last is None or last.kind not in (SLEEP, WAIT):
        return None
    if task.status != Status.CREATED or task.parked_by == SIGNAL:
        return last
    return last if last.until_time is not None and task.next_process_time > last.until_time - ROUNDING else None


def _newest_first(task: AbstractTask) -> QuerySet[Step]:
    rows = Step.objects.using(task._state.db).filter(location=task._meta.label_lower, task_id=task.pk)
    return rows.exclude(kind=SENT).order_by("-position")


# -- batches -----------------------------------------------------------------------------------------------------------

MAX_BATCHES_LISTED = 500
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
BATCH_VERBS = by_name(CANCEL_BATCH, RETRY_BATCH)
BATCH = RowDocument(
    "Batch", "A batch, and how many of its tasks are in each status.", Batch,
    ("id", "name", "create_time", "total", "queues", "callback_id"), {"statuses": dict[str, int]},
)  # fmt: skip
BatchDocument = Annotated[Document, BATCH]


def listed_batches(actor: Actor, using: str | None = None) -> list[Batch]:
    """Return the newest batches that the actor may view, of every database."""
    return sorted(_batches(actor, using), key=lambda row: row.create_time, reverse=True)[:MAX_BATCHES_LISTED]


def find_batch(key: str, actor: Actor, using: str | None = None) -> Batch | None:
    """Return a batch by its id, alone or behind its database, if it is there and the actor may view it."""
    alias, _colon, pk = key.rpartition(":")
    found: list[Batch] = []
    with suppress(TaskQueueError):
        found = _batches(actor, using or alias or None, pk=whole("id", pk))
    if len(found) > 1:
        raise BadInput("id", f"is of several batches: {', '.join(f'{row._state.db}:{row.pk}' for row in found)}.")
    return found[0] if found else None


def _batches(actor: Actor, using: str | None, **of: int) -> list[Batch]:
    found: list[Batch] = []
    for alias in aliases_in(locations(using)):
        rows = Batch.objects.using(alias).filter(**of).order_by("-pk").annotate(clock=Now())
        found += narrow(rows, actor)[:MAX_BATCHES_LISTED]
    return found


def batch_documents(rows: list[Batch]) -> list[BatchDocument]:
    """Return batches as data: one query for each of their task tables."""
    pairs = zip(rows, counts_of(rows), strict=True)
    return [BATCH.of(row, statuses={str(status): counts[str(status)] for status in Status}) for row, counts in pairs]


def act_on_batch(verb: Verb, row: Batch, actor: Actor, *, reason: str = "") -> int:
    """Cancel all tasks of a batch, or go on from where it failed; return how many tasks changed, and record it.

    Raises ``PermissionDenied`` unless the actor may use the verb on each queue of the batch. A task that was moved to
    another queue since stays as it is if the actor may not use the verb there.
    """
    check(verb, reason, actor)
    for queue in row.queues:
        check(verb, reason, actor, queue)
    alias = str(row._state.db)
    handle = BatchHandle(row, alias)
    handle.queues = None if actor.user is None else [queue for queue in all_queues() if actor.may(verb, queue)]
    with recorded(alias):
        changed = handle.cancel() if verb == CANCEL_BATCH else handle.retry()
        given = {"queue": sole(row.queues), "details": {"batch": row.pk, "name": row.name}}
        record(alias, actor, verb, reason=reason, changed=changed, **given)
    return changed


def fits(verb: Verb, counts: Mapping[str, int]) -> bool:
    """Whether a verb would change a batch with these counts."""
    changed = (Status.CREATED, Status.PROCESSING) if verb == CANCEL_BATCH else (Status.ERROR,)
    return any(counts[str(status)] for status in changed)


# -- the graph of a batch: which task waits for which, equal ones folded, in layers, as places on a page ---------------


@dataclass(slots=True)
class Node:
    """A box of the graph: one task, or several that are alike. ``x`` and ``y`` are its upper left corner."""

    key: TaskKey  # of its first task
    queue: str
    status: str
    reference: str | None
    text: str  # what people call the task
    kind: str  # the same of tasks that are alike: "shard …" of shard 1 and shard 2
    number: int = 1
    parents: list["Node"] = field(default_factory=list)
    layer: int = 0
    x: float = 0.0
    y: float = 0.0

    @property
    def name(self) -> str:
        return self.text if self.number == 1 else f"{self.number:,} \N{MULTIPLICATION SIGN} {self.kind}"

    @property
    def failed(self) -> bool:
        return self.status in (Status.ERROR, Status.POISON)


@dataclass(slots=True)
class Graph:
    """The tasks of a batch and their waits, placed; without a node if the batch is too large."""

    nodes: list[Node] = field(default_factory=list)  # the failed ones first
    lines: list[tuple[str, bool]] = field(default_factory=list)  # as data of an SVG path; whether the child still waits
    width: float = 0.0
    height: float = 0.0


def graph_of(row: Batch, actor: Actor) -> Graph:
    """Return the graph of a batch: its tasks and its callback, in at most three queries and four for each table."""
    alias, edges = str(row._state.db), Dependency.objects.using(row._state.db)  # in no order: it would read them all
    last = None if row.callback_id is None else TaskKey(row.callback_location, row.callback_id)
    asked = [edges.filter(child_location=last.location, child_id=last.id)] if last else []
    rows: dict[TaskKey, tuple[str, str | None, str]] = {}
    for tasks in BatchHandle(row, alias).tasks():
        label = tasks.model._meta.label_lower
        found = tasks.order_by("pk").values_list("pk", *SHOWN_OF_NODES)[: MAX_TASKS_DRAWN + 1]
        rows |= {TaskKey(label, one[0]): one[1:] for one in found}
        asked.append(edges.filter(child_location=label, child_id__in=tasks.values("pk")))
    if len(rows) > MAX_TASKS_DRAWN:
        return Graph()
    names: dict[TaskKey, str] = {}
    waits: list[Wait] = []
    columns = ("pk", "parent_location", "parent_id", "child_location", "child_id", "name", "outcome")
    for one in asked:
        for _pk, above, parent, below, child, name, outcome in sorted(one.values_list(*columns)[: MAX_EDGES_DRAWN + 1]):
            waits.append((TaskKey(above, parent), TaskKey(below, child), outcome is None))
            names.setdefault(waits[-1][0], name)
    if len(waits) > MAX_EDGES_DRAWN:
        return Graph()
    keys = dict.fromkeys([*rows, *([last] if last else []), *names])
    rows |= rows_of(keys.keys() - rows.keys(), alias, SHOWN_OF_NODES)
    sees = cache(actor.sees)
    return laid_out([_node(key, names.get(key, ""), rows.get(key, ("", None, "")), sees) for key in keys], waits, last)


def _node(key: TaskKey, name: str, found: tuple[str, str | None, str], sees: Callable[[str], bool]) -> Node:
    queue, reference, status = found
    if queue and not sees(queue):
        queue, reference, name = "", None, ""
    text = name or reference or f"{queue} {key.id}".strip()
    return Node(key, queue, status, reference, text, DIGITS.sub("…", name) or queue or "…")


def laid_out(nodes: Sequence[Node], waits: Sequence[Wait], last: TaskKey | None = None) -> Graph:
    """Return boxes in layers, each below all of its parents, and the lines between them.

    ``last`` waits for every task of the batch: it gets lines only from boxes without another child.
    """
    boxes, lines = folded(nodes, waits)
    for parent, child in lines:
        boxes[child].parents.append(boxes[parent])
    graph = Graph(sorted(boxes.values(), key=lambda node: not node.failed))
    _set_places(graph)
    children = Counter(parent for parent, _child in lines)
    graph.lines = [
        (_curve(boxes[parent], boxes[child]), is_open)
        for (parent, child), is_open in lines.items()
        if child != last or children[parent] == 1
    ]
    return graph


def _curve(parent: Node, child: Node) -> str:
    """Return a line, as the data of an SVG path, that leaves the parent and arrives at the child upright."""
    x1, y1, x2, y2 = parent.x + NODE_WIDTH / 2, parent.y + NODE_HEIGHT, child.x + NODE_WIDTH / 2, child.y
    middle = (y1 + y2) / 2
    return f"M{x1:g},{y1:g} C{x1:g},{middle:g} {x2:g},{middle:g} {x2:g},{y2:g}"


def folded(nodes: Sequence[Node], waits: Sequence[Wait]) -> tuple[dict[TaskKey, Node], Lines]:
    """Return the boxes by their first task, and which box waits for which: True while it waits.

    Few tasks have a box each. Of many, those of a kind and status that wait for the same boxes share one; where that
    is not enough, all of a queue and status in a layer. The first tasks that failed keep a box each.
    """
    parents: dict[TaskKey, list[TaskKey]] = {node.key: [] for node in nodes}
    waits = [wait for wait in waits if wait[0] in parents and wait[1] in parents]
    for parent, child, _open in waits:
        parents[child].append(parent)
    known = {node.key: node for node in nodes}
    with suppress(CycleError):  # SQL wrote it: all stay in the first layer
        for key in TopologicalSorter(parents).static_order():
            known[key].layer = max((known[one].layer + 1 for one in parents[key]), default=0)
    order = sorted(nodes, key=lambda node: node.layer)
    first_of = {node.key: node.key for node in order}
    for by_layer in (False, True):
        if len({*first_of.values()}) > MAX_BOXES:
            first_of = _first_equal(order, parents, by_layer=by_layer)
    boxes: dict[TaskKey, Node] = {}
    for node in order:
        if (box := boxes.get(first_of[node.key])) is None:
            box = boxes[first_of[node.key]] = replace(node, number=0)
        box.number += 1
        box.kind = box.kind if box.kind == node.kind else box.queue or "…"
    lines: Lines = {}
    for parent, child, is_open in waits:
        pair = first_of[parent], first_of[child]
        if pair[0] != pair[1]:
            lines[pair] = lines.get(pair, False) or is_open
    return boxes, lines


def _first_equal(
    nodes: Sequence[Node], parents: Mapping[TaskKey, Sequence[TaskKey]], *, by_layer: bool
) -> dict[TaskKey, TaskKey]:
    """Return for each task the first one that is like it. A chain of tasks that are alike is like its first."""
    alone = {node.key for node in [node for node in nodes if node.failed][:MAX_FAILED_ALONE]}
    first_of: dict[TaskKey, TaskKey] = {}
    known: dict[object, TaskKey] = {}
    for node in nodes:
        above = frozenset(first_of[key] for key in parents[node.key] if key in first_of)
        like = (node.queue, node.status, node.kind)
        shape: object = (like[:2], node.layer) if by_layer else (like, above)
        if node.key in alone:
            shape = node.key
        elif len(above) == 1 and ("chain", like, *above) in known:
            shape = ("chain", like, *above)
        first_of[node.key] = first = known.setdefault(shape, node.key)
        known.setdefault(("chain", like, first), first)
    return first_of


def _set_places(graph: Graph) -> None:
    """Give each box its place: the failed first, then near the middle of its parents. A wide layer has several rows."""
    layers: defaultdict[int, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        layers[node.layer].append(node)
    widest = min(max(map(len, layers.values()), default=0), MAX_NODES_IN_ROW)
    graph.width = 2 * MARGIN + widest * (NODE_WIDTH + GAP_X) - GAP_X
    y: float = MARGIN
    for _layer, nodes in sorted(layers.items()):
        nodes.sort(key=lambda node: (not node.failed, fmean([one.x for one in node.parents] or [0])))
        for start in range(0, len(nodes), MAX_NODES_IN_ROW):
            row = nodes[start : start + MAX_NODES_IN_ROW]
            left = (graph.width - len(row) * (NODE_WIDTH + GAP_X) + GAP_X) / 2
            for place, node in enumerate(row):
                node.x, node.y = left + place * (NODE_WIDTH + GAP_X), y
            y += NODE_HEIGHT + GAP_X
        y += GAP_Y - GAP_X
    graph.height = y - GAP_Y + MARGIN
