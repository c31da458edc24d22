"""``manage.py runtaskpoller`` as an operator runs it: what it takes, when it ends, what it says."""

import json
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command

from django_dbtaskqueue import Complete, Reenqueue, UnknownQueue, enqueue, enqueue_many, registry
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.management.commands.runtaskpoller import Command
from django_dbtaskqueue.models import Attempt, Poller, Queue, Task
from django_dbtaskqueue.poller import loop
from django_dbtaskqueue.poller.executors import Done
from django_dbtaskqueue.poller.lifetime import closing
from django_dbtaskqueue.poller.queue_state import ConnectionSet
from tests.clock import SteppedClock
from tests.conftest import ProcessDatabase, _as_default
from tests.poller.processes import keep_full, lines, polling, runtaskpoller
from tests.support import output_of, until


def statuses(queue: str = "work") -> Counter[str]:
    return Counter(Task.objects.filter(queue=queue).values_list("status", flat=True))


def polls(*queues: str, **options: Any) -> None:
    call_command("runtaskpoller", queue=queues, **options)


def test_drain_processes_everything_and_ends(postgres_process_database: ProcessDatabase, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    enqueue_many("work", [(f"w{n}", {"mark": str(mark)}) for n in range(20)])
    bad = enqueue("other", "bad\nline", {"do": "raise", "message": "two\nlines"})
    enqueue("atomic", "booked", {"do": "book"})
    enqueue("aio", "async")
    enqueue("work", "again", {"do": "reenqueue", "delay": 0.5})
    words = ("--drain", "--log-format", "json", "--queue", "work,other:2", "--queue", "atomic,aio")
    with runtaskpoller(postgres_process_database, *words) as poller:
        said = [json.loads(line) for line in poller.ended().splitlines()]
    assert statuses() == {"COMPLETED": 21} and statuses("other") == {"ERROR": 1}
    assert statuses("atomic") == statuses("aio") == {"COMPLETED": 1} and len(lines(mark)) == 20
    assert Attempt.objects.filter(queue="other").count() == 3
    log = "\n".join(line["message"] for line in said)
    assert "Stopped: 23 completed, 1 failed, 0 lost in" in log
    assert "other (weight 2, retry fixed:50ms, max_attempts 3)" in log
    row = Poller.objects.get()
    assert (row.state, row.finished, row.failed, row.held, row.running) == ("STOPPED", 27, 3, 0, [])
    failure = next(line for line in said if line["level"] == "WARNING")
    task = {"task_id": bad.pk, "queue": "other", "reference": "bad\nline", "attempt": 1}
    assert (task | {"logger": "django_dbtaskqueue"}).items() <= failure.items()
    assert {"time", "message"} <= failure.keys()


def test_max_tasks_is_never_exceeded(process_database: ProcessDatabase) -> None:
    enqueue_many("work", [{}] * 10)
    polls("work", max_tasks=3, threads=8)
    assert statuses() == {"COMPLETED": 3, "CREATED": 7}
    assert sum(Task.objects.values_list("total_attempt", flat=True)) == 3


def take_time(queue: str, seconds: float, clock: SteppedClock) -> list[int]:
    """Give the queue a processor that takes so many seconds by the clock; return the starts."""
    started: list[int] = []

    def process(task: Lease) -> None:
        started.append(task.id)
        clock.advance(seconds)

    registry.register(queue, process)
    return started


@pytest.fixture
def two_queues(postgres_process_database: ProcessDatabase, settings: Any, taskqueue_registry: None) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"quick": {}, "slow": {}}}


@pytest.mark.usefixtures("sqlite_process_database")
def test_queues_have_their_turns_by_weight() -> None:
    poller, turns = loop.Poller(registry.weights_of(["work:3", "other"])), Counter[str]()
    for _ in range(81):
        queues, asked = poller.fetcher.choose() or pytest.fail(f"no queue has a turn after {turns}")
        poller.fetcher.reserve(queues, -asked)
        for queue in queues:
            queue.fetched(got=asked, asked=asked, wakes=queue.wakes, next_due=None)
            turns[queue.name] += 1
    assert turns == {"work": 61, "other": 20}


@pytest.mark.usefixtures("two_queues")
def test_slow_tasks_have_their_turn_beside_a_backlog_of_quick_ones(clock: SteppedClock) -> None:
    slow = take_time("slow", 0.3, clock)
    take_time("quick", 0.0001, clock)
    enqueue_many("slow", [{}] * 5)
    keep_full("quick")
    with polling({"quick": 1, "slow": 1}, threads=2):
        until(lambda: keep_full("quick") or len(slow) == 5)


@pytest.mark.usefixtures("two_queues")
def test_the_last_line_counts_tasks_not_attempts() -> None:
    registry.register("quick", lambda task: 1 / task.payload)
    enqueue_many("quick", [(None, number) for number in (1, 0, 2)])
    with polling({"quick": 1}) as poller:
        until(lambda: "Stopped: 2 completed, 0 failed, 0 lost, 1 will retry in" in closing(poller, 1.0))
    # Workers of Spark settle by themselves: what became of two attempts may be told in the other order.
    enqueue("quick", "again")
    (last,) = Task.objects.checkout("quick", poller_instance=poller.instance)
    last.port, last.total_attempt, last.settled, last.outcome = poller.queues["quick"].port, 3, True, Complete()
    for one in (last, replace(last, total_attempt=2, outcome=Reenqueue(timedelta(0)))):
        poller.settler.finish(Done(one, None, 0.1), idle=False)
        poller.settler.settle(ConnectionSet())
    assert closing(poller, 1.0).startswith("Stopped: 3 completed, 0 failed, 0 lost, 1 will retry in")


def test_a_database_that_is_not_migrated_is_said(tmp_path: Path, django_db_blocker: Any) -> None:
    empty = ProcessDatabase("sqlite", f"sqlite:///{tmp_path}/empty.sqlite3")
    sentence = r"not migrated \(no such table: dbtaskqueue_task\)\. Run: python manage\.py migrate"
    with _as_default(empty, django_db_blocker), pytest.raises(CommandError, match=sentence) as ended:
        polls("work")
    assert ended.value.returncode == 3


COMMANDS = (
    "runtaskpoller --drain", "housekeeptasks", "taskqueue status", "taskqueue list",
    "taskqueue show 1", "taskqueue pause work", "taskqueue tokens", "taskqueue bulk list", "taskqueue index",
    "taskqueue tail --count 1", "taskqueue purge work --reason x --yes", "taskqueue reprocess --id 1 --yes",
)  # fmt: skip


def test_each_command_says_in_a_sentence_that_postgresql_is_not_migrated(unmigrated_database: None) -> None:
    sentence = r'The database is not migrated \(relation "\w+" does not exist\)\. Run: python manage\.py migrate'
    for line in COMMANDS:
        with pytest.raises(CommandError, match=f"^{sentence}$") as ended:
            output_of(*line.split())
        assert ended.value.returncode == 3, line


# -- which queues, and how often: the words of --queue and --exclude ---------------------------------------------------
def test_what_they_mean_also_if_a_name_has_a_colon(taskqueue_registry: None) -> None:
    for texts, excluded, wanted in (
        (["work"], [], {"work": 1}),
        (["work:3", "other"], [], {"work": 3, "other": 1}),
        (["work:3,other:2, aio"], ["aio"], {"work": 3, "other": 2}),
        (["work,work:2"], [], {"work": 2}),
        ([], [], dict.fromkeys(registry.queues(), 1)),  # every queue that has a processor
        ([], ["work", "other"], dict.fromkeys(set(registry.queues()) - {"work", "other"}, 1)),
    ):
        assert registry.weights_of(texts, excluded) == wanted
    registry.register("mail:8", print)
    assert registry.weights_of(["mail:8"]) == {"mail:8": 1} and registry.weights_of(["mail:8:2"]) == {"mail:8": 2}


BAD_OPTIONS = (
    ("--queue wrk", 3, "Unknown queue 'wrk'. Did you mean 'work'?"),
    ("--exclude wrk", 3, "Unknown queue 'wrk'. Did you mean 'work'?"),
    *((f"--queue work:{bad}", 3, "whole number of at least 1, as in work:2") for bad in ("0", "-1", "x", "9" * 5000)),
    ("--queue work --exclude work", 3, "--exclude leaves none of work"),
    ("--database defalt", 3, "There is no database 'defalt' in DATABASES"),
    ("--threads 0", 2, "'0' is not a whole number of at least 1"),
    ("--threads " + "9" * 20, 2, "is not a whole number of at least 1"),
    ("--shutdown-timeout soon", 2, "'soon' is not a duration"),
    ("--once --drain", 2, "not allowed with"),
)  # fmt: skip


def test_bad_options_are_named_with_the_fix(sqlite_process_database: ProcessDatabase, capsys: Any) -> None:
    for options, code, message in BAD_OPTIONS:
        with pytest.raises(SystemExit) as ended:
            Command().run_from_argv(["manage.py", "runtaskpoller", *options.split()])
        said = capsys.readouterr().err
        assert ended.value.code == code and message in said and "Traceback" not in said, options


def test_processes_are_refused_in_the_process_of_another_program(sqlite_process_database: ProcessDatabase) -> None:
    with pytest.raises(CommandError, match="needs its own process"):
        polls("work", processes=2)


@pytest.mark.django_db
@pytest.mark.usefixtures("taskqueue_registry")
def test_an_unknown_queue_is_named_with_its_nearest_and_one_without_a_processor_refused(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"letters": {}}}
    Queue.objects.create(name="made-at-night")
    for wrong, right in (("mad-at-night", "made-at-night"), ("leters", "letters")):
        with pytest.raises(UnknownQueue, match=rf"Unknown queue '{wrong}'\. Did you mean '{right}'\?"):
            registry.weights_of([wrong])
    with pytest.raises(ImproperlyConfigured, match="Queue 'made-at-night' has no processor in this project"):
        registry.weights_of(["made-at-night"])
    registry.restore(({}, {}, {}))
    with pytest.raises(ImproperlyConfigured, match="Queue 'letters' has no processor in this project"):
        registry.weights_of(["letters"])  # which stands in the settings
    with pytest.raises(ImproperlyConfigured, match="no processor is registered"):
        registry.weights_of([])
