"""The roads on which tasks run, each for a ``with`` block."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from django.core.management import call_command

from django_dbtaskqueue import Reenqueue, queue
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.db.session import model_for
from django_dbtaskqueue.poller.web_process import EmbeddedPoller
from django_dbtaskqueue.testing import drain, run_poller
from tests.conftest import ProcessDatabase
from tests.crossings.features import FEATURES, work
from tests.poller.processes import runtaskpoller

Road = Callable[[ProcessDatabase], AbstractContextManager[object]]


def command(*options: str) -> Road:
    """Run one ``runtaskpoller`` for all queues."""

    @contextmanager
    def road(database: ProcessDatabase) -> Iterator[None]:
        with runtaskpoller(database, "--queue", ",".join(FEATURES), "--tag", "gpu", *options) as poller:
            yield
            poller.ended() if options else poller.stop()

    return road


def once() -> None:
    """Run the command here: one checkout takes no more than there are free threads, and each may start a process."""
    for threads, queues in ((64, [*FEATURES.keys() - {"process"}]), (1, ["process"])):
        call_command("runtaskpoller", once=True, queue=queues, tag=["gpu"], threads=threads)


@contextmanager
def embedded(database: ProcessDatabase) -> Iterator[None]:
    poller = EmbeddedPoller()
    try:
        yield
    finally:
        poller.stop()


def take() -> None:
    for name in FEATURES:
        while task := queue(name, tags=["gpu"]).take():
            run(task)


def checkout() -> None:
    for name in FEATURES:
        tasks = model_for(name)._default_manager
        while leases := tasks.checkout(name, poller_instance="by hand", limit=10, tags=["gpu"]):
            for task in leases:
                run(task)


def run(task: Lease) -> None:
    """Do what a loop of one's own does."""
    try:
        result = work(task)
    except RuntimeError as error:
        task.fail(error)
    else:
        task.reenqueue() if isinstance(result, Reenqueue) else task.complete(result)


SPARK = "Spark"
QUICK_JAVA = "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
ROADS: dict[str, Road] = {
    "--once": lambda _: nullcontext(once()),
    "--drain": command("--drain"),
    "run_poller": lambda _: run_poller(*FEATURES, tags=["gpu"]),
    "drain()": lambda _: nullcontext(drain(tags=["gpu"])),
    "take()": lambda _: nullcontext(take()),
    "checkout": lambda _: nullcontext(checkout()),
    "poller": command(),
    "embedded": embedded,
    SPARK: command("--drain", "--executor", "spark", "--master", "local[2]", "--conf", QUICK_JAVA),
}
