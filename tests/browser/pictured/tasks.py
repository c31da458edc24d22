"""Processors that leave their tasks in the states that the docs' pictures show."""

import random
import threading
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from django.apps import apps
from django.core.management import call_command
from django.db.models.functions import Now
from django.utils import timezone

from django_dbtaskqueue import Debounce, Workflow, enqueue, enqueue_many, processor
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.metrics import class_of
from django_dbtaskqueue.models import Batch, FailureGroup, MinuteCount, Poller, Queue, Step, Task
from tests.browser.pictured.settings import SHOP

try:
    from django.tasks import TaskContext, task
except ImportError:
    from django_tasks import TaskContext, task

QUEUES = ("statements", "register", "search", "letters", *SHOP)
NIGHT = "import of the night"  # a workflow
MINUTE = timedelta(minutes=1)


@processor("statements", executor="process", timeout=timedelta(hours=1))
def write_statement(task: Lease) -> None:
    threading.Event().wait()


@processor("register")
def ask_register(task: Lease) -> None:
    threading.Event().wait()


@processor("search", unique=Debounce(timedelta(minutes=10), max_wait=timedelta(hours=1), fields=("flight",)))
def index(task: Lease) -> None:
    """Put a flight into the index of the search."""


@task(queue_name="letters", takes_context=True, max_attempts=3, backoff=0.5)
def post(context: TaskContext, passenger: str, *, language: str) -> dict[str, Any]:
    """Post a letter; the first attempt fails."""
    if context.attempt < 2:
        raise ConnectionError("the post office does not answer")
    return {"posted": passenger, "language": language, "attempt": context.attempt}


def play() -> None:
    """Enqueue what is shown, and lower a limit as an operator would."""
    enqueue("statements", "UA-2013", {"airline": "UA", "year": 2013})
    call_command("taskqueue", "set", "register", "max_running=2", "--reason", "the register is slow today")
    enqueue_many("register", [{"payload": {"tail_number": f"N{14200 + number}"}} for number in range(40)])
    for version in (1, 2, 3):
        enqueue("search", payload={"flight": "2013-01-02-UA-1545-EWR-IAH", "version": version})
    post.enqueue("Ada Lovelace", language="en")
    work_an_hour()
    plan = Workflow(NIGHT, on_complete="mail").add("fetch the index", "imports")
    shards = [f"shard {number:03}" for number in range(496)]
    for shard in shards:
        plan.add(shard, "imports", after="fetch the index")
    plan.add("publish", "exports", after=shards)
    plan.enqueue()
    rows = Task.objects.filter(queue="imports").order_by("pk").values_list("pk", flat=True)
    end("COMPLETED", rows[:400])
    end("ERROR", rows[400:402])


def end(status: str, keys: Iterable[int]) -> None:
    facts = {"parked_by": None, "ready_time": None, "attempt": 1, "total_attempt": 1, "finish_time": Now()}
    Task.objects.filter(pk__in=list(keys)).update(status=status, final_status=status, **facts)


def work_an_hour() -> None:
    """A deploy broke two queues. One queue is late, one is paused, and refunds wait for an approval."""
    chance, minute, counts = random.Random(3), timezone.now().replace(second=0, microsecond=0), []
    for number, queue in enumerate(SHOP[:-1], 1):
        for ago in range(1, 61):
            place = {"queue": queue, "minute": minute - ago * MINUTE}
            done, fails = chance.randint(150 // number, 300 // number), queue in ("invoices", "webhooks") and ago < 15
            times = {"runs": {str(class_of(0.03 * number)): done}, "waits": {str(class_of(0.004 * number)): done}}
            counts.append(MinuteCount(kind="call", name="put", count=done, **place))
            counts.append(MinuteCount(kind="outcome", name="completed", count=done, **times, **place))
            if fails:
                counts.append(MinuteCount(kind="outcome", name="failed", count=1 + done // 40, **place))
                counts.append(MinuteCount(kind="failure", name=queue * 4, minute=place["minute"], count=1 + done // 40))
    MinuteCount.objects.bulk_create(counts)
    for queue, error, message in (
        ("invoices", "KeyError", "'vat_number'"),
        ("webhooks", "shop.errors.SignatureMissing", "the request of 'acme' has no signature"),
    ):
        said = {"queue": queue, "error_type": error, "message": message, "newest": message}
        seen = {"first_seen": Now() - 14 * MINUTE, "last_seen": Now(), "release": "shop@7f3a21c"}
        FailureGroup.objects.create(fingerprint=queue * 4, frame=f"shop.{queue}:run", **said, **seen)
        enqueue_many(queue, [{"payload": {"order": number}} for number in range(14)])
        failed = Task.objects.filter(queue=queue)
        failed.update(fingerprint=queue * 4)
        end("ERROR", failed.values_list("pk", flat=True))
    enqueue_many("payments", [{}] * 31)
    Task.objects.filter(queue="payments").update(ready_time=Now() - 4 * MINUTE)
    enqueue("night-batch")
    call_command("taskqueue", "pause", "night-batch", "--reason", "database maintenance")
    for number in (1041, 1077):
        refund = Task.objects.get(pk=enqueue("refunds", f"order-{number}").pk)
        Task.objects.filter(pk=refund.pk).update(parked_by="signal", ready_time=None, total_attempt=1)
        Step.objects.create(task_id=refund.pk, task_time=refund.create_time, position=1, name="approved", kind="wait")
    alive = {"state": "RUNNING", "heartbeat_time": Now() + 10 * MINUTE, "slots": 16, "release": "shop@7f3a21c"}
    Poller.objects.create(instance=SHOP[0], host="worker-1", queues=[{"queue": queue} for queue in SHOP], **alive)


def clean() -> None:
    """Delete all of it, so that the demo's other pages do not show it."""
    Batch.objects.filter(name=NIGHT).delete()
    Poller.objects.filter(instance=SHOP[0]).delete()
    for model in apps.get_app_config(Task._meta.app_label).get_models():
        column = "name" if model is Queue else "queue"
        if column in {field.name for field in model._meta.concrete_fields}:
            model._base_manager.filter(**{f"{column}__in": QUEUES}).delete()
