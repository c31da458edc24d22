"""``manage.py runtaskpoller`` as an operator runs it: what it takes, when it ends, what it says."""

from __future__ import annotations

import json
import re
from collections import Counter
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.db.models.functions import Now

from django_dbtaskqueue import enqueue, enqueue_many
from django_dbtaskqueue.management.commands.runtaskpoller import Command
from django_dbtaskqueue.models import Attempt, Poller, Queue, Task
from tests.conftest import ProcessDatabase
from tests.poller.processes import lines, runtaskpoller
from tests.support import until


def statuses(queue: str = "work") -> Counter[str]:
    return Counter(Task.objects.filter(queue=queue).values_list("status", flat=True))


def test_drain_processes_everything_and_ends(process_database: ProcessDatabase, tmp_path: Path) -> None:
    # Given tasks of every kind, one of them failing for good and one due soon
    mark = tmp_path / "mark"
    enqueue_many("work", [(f"w{n}", {"mark": str(mark)}) for n in range(20)])
    enqueue("other", "bad", {"do": "raise"})
    enqueue("atomic", "booked", {"do": "book"})
    enqueue("aio", "async", {"do": "sleep"})
    enqueue("work", "again", {"do": "reenqueue", "delay": 0.5})
    # When it drains
    with runtaskpoller(process_database, "--drain", "--queue", "work,other:2", "--queue", "atomic,aio") as poller:
        log = poller.ended()
    # Then all is done, once each, and it says so
    assert statuses() == {"COMPLETED": 21}
    assert statuses("other") == {"ERROR": 1}
    assert statuses("atomic") == statuses("aio") == {"COMPLETED": 1}
    assert len(lines(mark)) == 20
    assert Attempt.objects.filter(queue="other").count() == 3
    assert "Stopped: 27 finished, 3 failed, 0 lost" in log
    assert "other (weight 2, retry fixed:50ms, max_attempts 3)" in log
    row = Poller.objects.get()
    assert (row.state, row.finished, row.failed, row.held, row.running) == ("STOPPED", 27, 3, 0, [])


def test_once_takes_one_batch_of_each_queue(process_database: ProcessDatabase) -> None:
    enqueue_many("work", [(None, {"do": "ok"})] * 5)
    with runtaskpoller(process_database, "--once", "--threads", "2", "--queue", "work") as poller:
        poller.ended()
    assert statuses() == {"COMPLETED": 2, "CREATED": 3}


def test_max_tasks_is_never_exceeded(process_database: ProcessDatabase) -> None:
    enqueue_many("work", [(None, {"do": "ok"})] * 10)
    with runtaskpoller(process_database, "--max-tasks", "3", "--threads", "8", "--queue", "work") as poller:
        poller.ended()
    assert statuses() == {"COMPLETED": 3, "CREATED": 7}
    assert sum(Task.objects.values_list("total_attempt", flat=True)) == 3


def test_queues_have_their_turns_by_weight(postgres_process_database: ProcessDatabase, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for queue in ("work", "other"):
        enqueue_many(
            queue, [(f"{queue}-{n}", {"do": "sleep", "seconds": 0.004, "mark": str(mark)}) for n in range(400)]
        )
    options = ["--queue", "work:3,other", "--threads", "1", "--max-tasks", "240"]
    with runtaskpoller(postgres_process_database, *options) as poller:
        poller.ended()
    shares = Counter(reference.split("-")[0] for _, reference, *_ in lines(mark))
    assert shares["other"] and 1.5 < shares["work"] / shares["other"] < 6, shares


def test_slow_tasks_have_their_turn_beside_a_backlog_of_quick_ones(
    postgres_process_database: ProcessDatabase, tmp_path: Path
) -> None:
    # Given so many quick tasks that they never run out, and a few slow ones, which no poller takes ahead
    mark = tmp_path / "mark"
    enqueue_many("work", [(None, {})] * 60_000)
    enqueue_many("other", [(f"slow-{n}", {"do": "sleep", "seconds": 0.3, "mark": str(mark)}) for n in range(5)])
    with runtaskpoller(postgres_process_database, "--queue", "work,other", "--threads", "2") as poller:
        until(lambda: len(lines(mark)) == 5)
        # Then the slow ones were all started while quick ones still waited
        assert Task.objects.filter(queue="work", status="CREATED").exists()
        poller.signal()
        poller.ended()


def test_a_paused_queue_waits_and_goes_on(process_database: ProcessDatabase) -> None:
    # Given a paused queue beside one that is not
    Queue.objects.create(name="work", paused_time=Now())
    enqueue("work", "paused")
    enqueue("other", "not paused")
    with runtaskpoller(process_database, "--queue", "work,other") as poller:
        until(lambda: statuses("other") == {"COMPLETED": 1})
        # Then it is left alone, and taken after the pause
        assert Task.objects.get(queue="work").total_attempt == 0
        Queue.objects.update(paused_time=None)
        until(lambda: statuses() == {"COMPLETED": 1})
        poller.signal()
        poller.ended()


def test_a_task_without_a_handler_is_parked_uncharged(process_database: ProcessDatabase) -> None:
    task = enqueue("work", "typed")
    Task.objects.update(payload_type="shop.Order")
    with runtaskpoller(process_database, "--once", "--queue", "work") as poller:
        poller.ended()
    task.refresh_from_db()
    assert (task.status, task.attempt, task.ready_time) == ("CREATED", 0, None)
    assert task.parked_by and "shop.Order" in task.parked_by


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--queue", "wrk"], 3, "Unknown queue 'wrk'. Did you mean 'work'?"),
        (["--exclude", "wrk"], 3, "Unknown queue 'wrk'. Did you mean 'work'?"),
        (["--queue", "work:0"], 3, "'work:0': the weight of a queue is a whole number of at least 1"),
        (["--queue", "work", "--exclude", "work"], 3, "--exclude leaves none of work"),
        (["--database", "defalt"], 3, "There is no database 'defalt' in DATABASES"),
        (["--threads", "0"], 2, "'0' is not a whole number of at least 1"),
        (["--shutdown-timeout", "soon"], 2, "'soon' is not a duration"),
        (["--once", "--drain"], 2, "not allowed with"),
    ],
)
def test_bad_options_are_named_with_the_fix(
    sqlite_process_database: ProcessDatabase,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    code: int,
    message: str,
) -> None:
    """What ``manage.py`` does with the arguments, in this process."""
    with pytest.raises(SystemExit) as ended:
        Command().run_from_argv(["manage.py", "runtaskpoller", *options])
    assert ended.value.code == code
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_a_database_that_is_not_migrated_is_said(tmp_path: Path) -> None:
    with runtaskpoller(ProcessDatabase("sqlite", f"sqlite:///{tmp_path}/empty.sqlite3")) as poller:
        log = poller.ended(3)
    assert "not migrated (no such table: dbtaskqueue_task). Run: python manage.py migrate" in log


@pytest.mark.parametrize(
    "line",
    [
        "runtaskpoller --drain", "housekeeptasks", "generatetasks --tasks 1", "taskqueue status", "taskqueue list",
        "taskqueue show 1", "taskqueue pause work", "taskqueue tokens", "taskqueue bulk list", "taskqueue index",
        "taskqueue tail --count 1", "taskqueue purge work --reason x --yes", "taskqueue reprocess --id 1 --yes",
    ],
)  # fmt: skip
def test_each_command_says_in_a_sentence_that_postgresql_is_not_migrated(unmigrated_database: None, line: str) -> None:
    with pytest.raises(CommandError) as ended:
        call_command(*line.split(), stdout=StringIO())
    assert ended.value.returncode == 3
    sentence = r'The database is not migrated \(relation "\w+" does not exist\)\. Run: python manage\.py migrate'
    assert re.fullmatch(sentence, str(ended.value))


def test_json_log_lines_carry_the_task(process_database: ProcessDatabase) -> None:
    task = enqueue("other", "bad\nline", {"do": "raise", "message": "two\nlines", "until_attempt": 2})
    with runtaskpoller(process_database, "--drain", "--log-format", "json", "--queue", "other") as poller:
        found = [json.loads(line) for line in poller.ended().splitlines()]
    failure = next(line for line in found if line["level"] == "WARNING")
    assert (failure["task_id"], failure["queue"], failure["reference"], failure["attempt"]) == (
        task.pk,
        "other",
        "bad\nline",
        1,
    )
    assert failure["logger"] == "django_dbtaskqueue"
    assert {"time", "message"} <= failure.keys()


def test_call_command_polls_in_this_process(process_database: ProcessDatabase) -> None:
    enqueue("work", "here")
    call_command("runtaskpoller", queue=["work"], drain=True, threads=1)
    assert statuses() == {"COMPLETED": 1}
    with pytest.raises(CommandError, match="needs its own process"):
        call_command("runtaskpoller", queue=["work"], processes=2)
    with pytest.raises(CommandError, match="Did you mean 'work'") as refused:
        call_command("runtaskpoller", queue=["wrk"])
    assert refused.value.returncode == 3
