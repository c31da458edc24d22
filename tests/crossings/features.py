"""What is enqueued for each feature, what a road makes of it, and which roads make something else of it."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from django.db.models.functions import Now

from django_dbtaskqueue import Reenqueue, batch, enqueue, processor, signals
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.db.session import aliases_of, model_for
from django_dbtaskqueue.models import Poller, Queue, Schedule, TaskHistory
from tests.factories import age
from tests.support import taken_back
from tests.testapp.models import Booking

HOUR = timedelta(hours=1)


@dataclass
class Order:
    """A payload that no processor takes."""

    number: int


class Books(signals.Listener):
    """Writes down which tasks it was told of."""

    def executed(self, task: Lease, outcome: object) -> None:
        if task.queue == "listeners":
            Booking.objects.create(reference=f"told of {task.id}")


def work(task: Lease) -> Any:
    """Do what the payload says; return the process that did it."""
    if task.payload == "fail":
        raise RuntimeError("as asked")
    return Reenqueue() if task.payload == "again" else os.getpid()


def register() -> None:
    for name in FEATURES:
        processor(name, retry="fixed:1ms", executor="process" if name == "process" else None)(work)


def fill(queue: str, references: Iterable[str], **options: Any) -> Any:
    """Enqueue tasks; return the last one."""
    return [enqueue(queue, reference, **options) for reference in references][-1]


def fill_each(queue: str, option: str, values: Mapping[str, object]) -> None:
    """Enqueue a task for each value of an option."""
    for reference, value in values.items():
        enqueue(queue, reference, **{option: value})


def fill_batch(queue: str) -> None:
    with batch("crossing", on_complete={"queue": queue, "reference": "callback"}):
        fill(queue, "ab")


def fill_overrides(queue: str) -> None:
    policies = {"retry": "fixed:1h,jitter=0", "reenqueue": "fixed:2h,jitter=0"}
    Queue.objects.create(name=queue, overrides={**policies, "batch_size": 2})
    for payload in ("fail", "again", "third"):
        enqueue(queue, payload, payload)


def fill_schedule(queue: str) -> None:
    tick = Schedule(name="crossing", queue=queue, cron="0 0 1 1 *", timezone="UTC", next_time=Now())
    Schedule.objects.bulk_create([tick])


def fill_ttl(queue: str) -> None:
    enqueue(queue, "late", ttl=HOUR / 2)
    age(HOUR, queue=queue)
    enqueue(queue, "in time", ttl=HOUR)


def tasks(queue: str) -> list[Any]:
    """Return the tasks of all databases, in the order in which they were enqueued."""
    found = [model_for(queue)._base_manager.using(alias).filter(queue=queue) for alias in aliases_of(queue)]
    return [task for rows in found for task in rows.order_by("pk")]


def statuses(queue: str) -> str:
    found: dict[str, list[str]] = {}
    for task in tasks(queue):
        found.setdefault(task.status, []).append(str(task.reference))
    return ", ".join(f"{status} {' '.join(references)}" for status, references in sorted(found.items()))


def in_turn(queue: str) -> str:
    """Return the statuses, and which task ran beside the one before it."""
    ended = sorted((task for task in tasks(queue) if task.finish_time), key=lambda task: (task.start_time, task.pk))
    beside = [two.reference for one, two in pairwise(ended) if two.start_time < one.finish_time]
    return ", ".join([statuses(queue), *(f"{reference} beside another" for reference in beside)])


def order(queue: str) -> str:
    """Return the tasks that were taken, the first one first."""
    taken = [task for task in tasks(queue) if task.start_time]
    return " ".join(task.reference for task in sorted(taken, key=lambda task: (task.start_time, task.priority)))


def overridden(queue: str) -> str:
    """Return when tasks are due again, which were never taken, and whether more than two were taken at once."""
    taken = [task for task in tasks(queue) if task.start_time]
    hours = [round((task.next_process_time - task.last_update_time) / HOUR) for task in taken]
    many = max(Counter(task.start_time for task in taken).values(), default=0) > 2
    again = [f"{task.reference} in {wait} h" for task, wait in zip(taken, hours, strict=True) if not task.finish_time]
    return ", ".join([*again, *["3 at once"] * many, f"{len(tasks(queue)) - len(taken)} not taken"])


def further_call(queue: str) -> str:
    """Return what there is, and whether one more call would insert a task."""
    with taken_back():
        inserts = not enqueue(queue, payload="same").enqueue_note
    return f"{kinds(queue)}, a further call {'inserts' if inserts else 'does not insert'}"


def kinds(queue: str) -> str:
    return " ".join(f"parked after {task.attempt} attempts" if task.parked_by else task.status for task in tasks(queue))


def in_history(queue: str) -> str:
    return f"{kinds(queue)}{TaskHistory.objects.filter(queue=queue, status='COMPLETED').count()} in the history"


def where(queue: str) -> str:
    """Return which process ran the task."""
    pids = dict.fromkeys(Poller.objects.values_list("pid", flat=True), "the poller") | {os.getpid(): "the caller"}
    return " ".join(pids.get(task.result, "a child") if task.finish_time else task.status for task in tasks(queue))


class Differs(NamedTuple):
    """What a road makes of a feature instead, and why."""

    found: str
    note: str
    holds: bool = False  # the feature holds, but less is done


@dataclass(frozen=True)
class Feature:
    """``fill(queue)`` enqueues. After a road ``found(queue)`` is ``expected``, unless the road differs."""

    title: str
    fill: Callable[[str], object]
    expected: str
    found: Callable[[str], str] = statuses
    roads: Mapping[str, Differs] = field(default_factory=dict)

    def after(self, road: str) -> str:
        return self.roads[road].found if road in self.roads else self.expected


def once(found: str) -> dict[str, Differs]:
    note = "It takes one batch of each queue. What is ready after that, or does not fit, waits for the next run."
    return {"--once": Differs(found, note, holds=True)}


def by_hand(found: str, note: str) -> dict[str, Differs]:
    return dict.fromkeys(("take()", "checkout"), Differs(found, note))


GROUPS = {"a1": "a", "a2": "a", "b1": "b"}
TAGS = {"untagged": None, "gpu": "gpu", "other": "other"}
PRIORITIES = {"low": 5, "mid": 0, "urgent": -5}
a, abc = partial(fill, references="a"), partial(fill, references="abc")
TICKS = "Only pollers and the test kit enqueue tasks of schedules."
DIRECT = Differs("the caller", "Everything runs on the calling thread.")
BY_CALLER = dict.fromkeys(("drain()", "take()", "checkout"), DIRECT)
LEFT = Differs("CREATED", "It leaves queues whose processors name an executor to `runtaskpoller`.")
LATER = "fail in 1 h, again in 2 h"
MANY = Differs(f"{LATER}, 3 at once, 0 not taken", "Its `limit` counts, and not `batch_size`.", holds=True)
SPREAD = "COMPLETED d e f g a b c h"  # over two databases
ONE_SHARD = Differs(SPREAD, "A call takes from one shard. Call it until it returns nothing.", holds=True)
ELSEWHERE = Differs("1", "They run in the poller, and see outcomes without results.", holds=True)
BESIDE = Differs("a child", "Such a processor runs in a child of the poller, not on Spark.", holds=True)
EVERY_TYPE = "They take every type, and give plain JSON where the process knows no class."
FEATURES: dict[str, Feature] = {
    "after": Feature("`after=`", lambda queue: enqueue(queue, "child", after=enqueue(queue, "parent")),
                     "COMPLETED parent child", in_turn, once("COMPLETED parent, CREATED child")),
    "batch": Feature("batches", fill_batch, "COMPLETED a b callback", roads=once("COMPLETED a b, CREATED callback")),
    "overrides": Feature("overrides of an operator", fill_overrides, f"{LATER}, 0 not taken", overridden,
                         {**once(f"{LATER}, 1 not taken"), "checkout": MANY}),
    "max_running": Feature("`max_running`", abc, "COMPLETED a b c", in_turn, once("COMPLETED a, CREATED b c")),
    "rate": Feature("`rate`", abc, "COMPLETED a b, CREATED c"),
    "rate_per_group": Feature("`rate_per_group`", partial(fill_each, option="group", values=GROUPS),
                              "COMPLETED a1 b1, CREATED a2"),
    "groups": Feature("groups", partial(abc, group="g"), "COMPLETED a b c", in_turn, once("COMPLETED a, CREATED b c")),
    "tags": Feature("tags", partial(fill_each, option="tag", values=TAGS), "COMPLETED untagged gpu, CREATED other"),
    "priorities": Feature("priorities", partial(fill_each, option="priority", values=PRIORITIES), "urgent mid low",
                          order, once("urgent")),
    "schedules": Feature("schedules", fill_schedule, "COMPLETED", kinds, by_hand("", TICKS)),
    "unique": Feature("uniqueness", lambda queue: [enqueue(queue, payload="same") for _ in range(2)],
                      "COMPLETED, a further call inserts", further_call),
    "ttl": Feature("`ttl`", fill_ttl, "COMPLETED in time, POISON late"),
    "own_table": Feature("own table", partial(fill, references="a", columns={"weight": 3}), "COMPLETED a"),
    "shards": Feature("shards", partial(fill, references="abcdefgh"), SPREAD, roads={"checkout": ONE_SHARD}),
    "history": Feature('`keep="history"`', abc, "3 in the history", in_history),
    "types": Feature("unknown payload types", lambda queue: enqueue(queue, payload=Order(1)),
                     "parked after 0 attempts", kinds, by_hand("COMPLETED", EVERY_TYPE)),
    "process": Feature('`executor="process"`', a, "a child", where, BY_CALLER | {"embedded": LEFT, "Spark": BESIDE}),
    "listeners": Feature("listeners", a, "1", lambda _: str(Booking.objects.count()),
                         {**by_hand("0", "They call no listeners."), "Spark": ELSEWHERE}),
}  # fmt: skip


def table(roads: Iterable[str]) -> str:
    """Return the table of the documentation, and its notes."""
    notes: dict[str, int] = {}
    lines = [["", *(road if road.isalpha() else f"`{road}`" for road in roads)], ["---", *(":-:" for _ in roads)]]
    for feature in FEATURES.values():
        cells = []
        for road in roads:
            differs = feature.roads.get(road)
            mark = "✓" if differs is None or differs.holds else "no"
            cells.append(mark if differs is None else f"{mark} {notes.setdefault(differs.note, len(notes) + 1)}")
        lines.append([feature.title, *cells])
    rows = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([*rows, "", *(f"{number}. {note}" for note, number in notes.items()), ""])
