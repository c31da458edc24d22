"""SIGKILL at seven labelled points: nothing is lost, and another poller goes on with what was orphaned."""

import signal
from datetime import timedelta
from pathlib import Path

from django.db.models import Count

from django_dbtaskqueue import enqueue_many
from django_dbtaskqueue.models import Attempt, Poller, Task
from django_dbtaskqueue.poller.executors.process import MAX_ISOLATED_TASKS
from tests import factories
from tests.chaos import ALONE
from tests.chaos.crashing import POINTS
from tests.chaos.processes import Configure, Start, expire_orphans, on, until_all, until_dead
from tests.poller.processes import lines
from tests.support import until

TASKS = 8  # of each victim, which has four threads
QUEUES = dict(zip(POINTS, ALONE, strict=False))  # of the poller that dies at each point
SPENT = {"attempt": 3, "max_attempts": 3, "next_process_time": timedelta(seconds=-1)}  # a task to rescue


def feed(point: str, gate: Path) -> None:
    if point == "in rescue":
        factories.make_task("PROCESSING", queue=QUEUES[point], **SPENT)
    else:
        payload = {"do": "hold", "until": str(gate)} if point == "in renewal" else {"do": "ok"}
        enqueue_many(QUEUES[point], [{"payload": payload}] * TASKS)


@on("postgres_process_database", "sqlite_process_database")
def test_nothing_is_lost_wherever_a_poller_dies(audited: None, start: Start, queues: Configure, tmp_path: Path) -> None:
    queues(**{QUEUES["in renewal"]: {"lease": "6s"}})  # it renews soon; nobody else polls the queue meanwhile
    gate = tmp_path / "gate"
    for point in POINTS:
        feed(point, gate)
    until_dead(*[start(queue=QUEUES[point], die=point) for point in POINTS])
    orphans, settled = holds("PROCESSING"), holds("COMPLETED")
    assert orphans.keys() - {"after the outcome's commit"} == {*POINTS} - {"before checkout's commit", *settled}
    assert settled.keys() == {"after the outcome's commit"} and not Attempt.objects.exists()
    held = set(Task.objects.filter(status="PROCESSING", attempt=1).values_list("pk", flat=True))
    gate.touch()
    heir = start(queue=",".join(QUEUES.values())).ready()
    until(lambda: not Task.objects.filter(status="CREATED").exists())
    until_all("COMPLETED", "ERROR")
    rescued = Task.objects.get(queue=QUEUES["in rescue"])
    assert (rescued.status, rescued.attempt) == ("ERROR", 3)
    assert [row.task_id for row in Attempt.objects.all()] == [rescued.pk]
    others = Task.objects.exclude(pk=rescued.pk)
    assert set(others.values_list("status", flat=True)) == {"COMPLETED"}
    assert set(others.filter(total_attempt=2, attempt=2).values_list("pk", flat=True)) == held
    assert others.filter(total_attempt=1, attempt=1).count() == TASKS * (len(POINTS) - 1) - len(held)
    heir.stop()


def holds(status: str) -> dict[str, int]:
    counted = Task.objects.filter(status=status).values_list("queue").annotate(Count("pk")).order_by()
    points = {queue: point for point, queue in QUEUES.items()}
    return {points[queue]: number for queue, number in counted}


def test_what_killed_pollers_held_runs_in_children_and_holds_nobody_up(start: Start, tmp_path: Path) -> None:
    mark, gate, orphans = tmp_path / "mark", tmp_path / "gate", 2 * TASKS
    payload = {"do": "hold", "until": str(gate), "each": True, "mark": str(mark)}
    held = Task.objects.exclude(queue="ledger")
    for queue in ALONE[:2]:
        enqueue_many(queue, [{"payload": payload}] * TASKS)
    victims = [start("--name", "same", "--threads", str(TASKS), queue=queue) for queue in ALONE[:2]]
    until(lambda: len(lines(mark)) == orphans)
    for victim in victims:
        victim.signal(signal.SIGKILL)
    until_dead(*victims)
    # When another one takes them, then as many run at the same time as there are children, and none takes a thread
    Poller.objects.filter(pid=victims[0].pid).delete()  # so that nobody remembers it; it may not have reported yet
    expire_orphans()
    heir = start("--name", "same", "--threads", "4", queue=",".join((*ALONE[:2], "ledger")))
    until(lambda: len(lines(mark)) == orphans + MAX_ISOLATED_TASKS)
    enqueue_many("ledger", [{}] * 50)
    until_all("COMPLETED", queue="ledger")
    assert set(held.values_list("status", flat=True)) == {"PROCESSING"}
    Path(f"{gate}.2").touch()
    until_all("COMPLETED")
    assert set(held.values_list("attempt", flat=True)) == {2}
    heir.stop()
