"""Put, take and what becomes of a task: each verb of the pull API, by the lease or by its token."""

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction

from django_dbtaskqueue import DuplicateTask, LeaseLost, enqueue_many, processor, queue
from django_dbtaskqueue.models import Attempt, Task
from django_dbtaskqueue.pull.handle import QueueHandle
from tests.factories import age, make_task
from tests.operations.site import refused
from tests.processing.conftest import Letter
from tests.pull.conftest import DAY, HOUR, SECOND, Configure, Told, row, status, taken
from tests.support import minute_counts, output_of, taken_back


def test_behind_tasks_whose_group_has_no_token_others_are_taken(mail: QueueHandle, configure: Configure) -> None:
    configure(rate_per_group="1/h", max_running_per_group=9)
    for number in range(6):
        mail.put(number, group="g")
    mail.put("other", group="h")
    mail.put("free")
    assert [mail.take().payload for _ in range(3)] == [0, "other", "free"]
    assert mail.take() is None


@pytest.mark.usefixtures("taskqueue_registry")
def test_a_payload_comes_back_as_the_processor_s_type_or_goes_to_error_alone(mail: QueueHandle) -> None:
    processor("mail", payload=Letter)(lambda task: None)
    broken = make_task(queue="mail", payload={"nobody": 1})
    assert taken(mail, Letter("ada")).payload == Letter("ada")
    assert status(broken) == "ERROR"
    # A checkout ends no more of them than it may take: a wrong class must not empty the queue in one call.
    others = [make_task(queue="mail", payload={"nobody": 1}) for _ in range(3)]
    assert Task.objects.checkout("mail", poller_instance="p:1:x", limit=2) == []
    assert [status(task) for task in others] == ["ERROR", "ERROR", "CREATED"]


def test_a_take_ends_a_dead_last_attempt(mail: QueueHandle, configure: Configure, told: Told, monkeypatch: Any) -> None:
    configure(max_attempts=1)
    task = taken(mail)
    age(HOUR)
    monkeypatch.setattr("django_dbtaskqueue.pull.handle.RESCUE_INTERVAL_S", 0.0)
    monkeypatch.setattr("django_dbtaskqueue.pull.handle._next_rescue", {})
    assert mail.take() is None
    assert status(task) == "ERROR" and Attempt.objects.get().error_type.endswith("ProcessDied")
    assert told[-1] == ("lease_expired", task.id)


def test_ack_completes_with_a_result_and_obeys_the_setting_keep(mail: QueueHandle, configure: Configure) -> None:
    task = taken(mail)
    mail.ack(task, {"sent": True})
    assert (row(task).status, row(task).result) == ("COMPLETED", {"sent": True})
    refused(None, mail.ack, task, error=LeaseLost)
    for keep in ("history", "delete"):
        configure(keep=keep)
        mail.ack(taken(mail))
        assert Task.objects.get().pk == task.id


def test_touch_extends_lease_and_time_to_live_by_the_delta(mail: QueueHandle, told: Told) -> None:
    task = taken(mail, ttl=HOUR)
    before, deadline = Task.objects.values().get(), task.deadline
    mail.touch(task, 0 * SECOND)
    for wrong in (None, 5, -SECOND, 999_999_999 * DAY):
        with pytest.raises((TypeError, ValueError), match=r"needs a timedelta|must be from zero"):
            mail.touch(task, wrong)  # type: ignore[arg-type]
    assert told.calls() == ["put", "take"] and Task.objects.values().get() == before
    mail.touch(task, HOUR)
    after = Task.objects.values().get()
    changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert changed.keys() == {"next_process_time", "expire_time"}
    assert all(abs(added - HOUR) <= SECOND / 1000 for added in changed.values())
    assert (task.lease_until, task.deadline) == (after["next_process_time"], deadline + 3600)


def test_bury_by_the_holder_and_by_id_but_not_what_another_processes(mail: QueueHandle) -> None:
    held, waiting = taken(mail), mail.put()
    assert mail.bury(held.id) is False
    assert mail.bury(held, "no such address") is True
    assert (row(held).status, row(held).process_result) == ("POISON", "no such address")
    assert mail.bury(waiting.pk) is True
    assert status(waiting) == "POISON"
    assert mail.bury(waiting.pk) is mail.bury(12_345) is False
    assert mail.take() is None


def test_the_lease_s_own_verbs_count_as_calls_too(mail: QueueHandle, told: Told) -> None:
    taken(mail).complete()
    taken(mail).poison("bad")
    taken(mail).fail("later", delay=HOUR)
    assert told.calls() == ["put", "take", "ack", "put", "take", "bury", "put", "take", "fail"]


def test_a_task_of_another_queue_is_refused(mail: QueueHandle) -> None:
    task = taken(queue("other"))
    refused("is of queue 'other', not of 'mail'", mail.ack, task)
    refused("of queue 'other'", mail.ack, queue("other").token(task))
    refused("neither a lease", mail.ack, task.id, error=TypeError)
    queue("other").ack(task)


# -- tokens: who holds one may ack, release and touch, on any connection and in any process --------------------------
def test_after_a_reconnect_the_token_is_as_good_as_the_lease(mail: QueueHandle) -> None:
    held = taken(mail, {"to": "ada"}, "r", context={"trace": "1"})
    token = mail.token(held)
    connection.close()
    mail.touch(token, HOUR)
    again = mail.from_token(token)
    assert (again.id, again.total_attempt, again.attempt) == (held.id, held.total_attempt, 1)
    assert (again.payload, again.context) == ({"to": "ada"}, {"trace": "1"})
    assert again.lease_until > held.lease_until
    mail.ack(token, "sent")
    assert status(held) == "COMPLETED"


def test_another_process_acks_by_the_token_and_knows_a_queue_made_here(postgres_process_database: Any) -> None:
    queue("made").create(max_attempts=7)
    task = taken(work := queue("work"))
    code = f"from django_dbtaskqueue import queue; queue('work').ack({work.token(task)!r}); queue('made').put()"
    postgres_process_database.run("shell", "-v", "0", "-c", code)
    assert status(task) == "COMPLETED" and Task.objects.get(queue="made").max_attempts == 7


def test_a_token_is_used_up_by_settling(mail: QueueHandle) -> None:
    for verb in (mail.ack, mail.release, mail.bury):
        mail.truncate()
        token = mail.token(taken(mail))
        verb(token)
        before = Task.objects.values().get()
        for other in (mail.ack, mail.release, mail.bury, mail.from_token, lambda token: mail.touch(token, HOUR)):
            refused(None, other, token, error=LeaseLost)
        assert Task.objects.values().get() == before


def test_a_token_cannot_be_made_up_and_counts_until_another_has_taken_the_task(mail: QueueHandle) -> None:
    token = mail.token(held := taken(mail))
    for wrong in (token[:-1], "x" + token, "", "1:1", token.replace(token[3], "A" if token[3] != "A" else "B", 1)):
        refused("is not the token of a lease", mail.ack, wrong)
    assert Task.objects.get().status == "PROCESSING"
    age(HOUR)
    assert mail.from_token(token).deadline < held.deadline
    second = mail.take()
    refused(None, mail.ack, token, error=LeaseLost)
    age(HOUR)
    mail.ack(mail.token(second))
    assert row(held).attempt == 2


def test_inside_a_transaction_everything_commits_or_rolls_back_with_it(mail: QueueHandle, told: Told) -> None:
    task = mail.put()
    told.clear()
    with taken_back():
        mail.ack(mail.take())
        mail.put("rolled back, too")
    assert (row(task).status, row(task).total_attempt) == ("CREATED", 0) and told == []
    with transaction.atomic():
        mail.ack(mail.take())
        taken(mail)
        assert told == []
    assert status(task) == "COMPLETED" and told.calls() == ["take", "ack", "put", "take"]
    assert mail.take() is None


def test_peek_changes_nothing(mail: QueueHandle) -> None:
    task = mail.put({"a": 1}, "r")
    refused(None, mail.put, 2, "r", error=DuplicateTask)
    before = Task.objects.values().get()
    found = mail.peek(task.pk)
    assert found is not None and (found.reference, found.payload) == ("r", {"a": 1})
    assert Task.objects.values().get() == before
    assert mail.peek(task.pk + 1) is queue("other").peek(task.pk) is None


def test_kick_brings_buried_tasks_back_the_oldest_first(mail: QueueHandle, told: Told) -> None:
    ids = [mail.put().pk for _ in range(3)]
    for task_id in ids:
        mail.bury(task_id)
    told.clear()
    assert (mail.kick(0), mail.kick(2)) == (0, 2)
    assert told == [("kick", ids[0]), ("kick", ids[1])]
    assert [mail.take().id, mail.take().id] == ids[:2]
    assert mail.kick(99) == 1
    refused("not negative", mail.kick, -1, error=ValueError)


def test_delete_revokes_a_lease_and_ids_are_never_used_again(mail: QueueHandle) -> None:
    task = taken(mail)
    assert (mail.delete(task.id), mail.delete(task.id)) == (True, False)
    refused(None, mail.ack, task, error=LeaseLost)
    assert minute_counts("deletion").get().count == 1
    # Even the last id of an emptied table is not given out again
    later = mail.put()
    assert later.pk > task.id
    mail.truncate()
    assert mail.put().pk > later.pk


def test_release_all_revokes_every_lease(mail: QueueHandle, told: Told) -> None:
    ids = [mail.put().pk for _ in range(3)]
    held = [mail.take(), mail.take()]
    told.clear()
    assert mail.release_all() == 2
    assert told == [("release", ids[0]), ("release", ids[1])]
    for task in held:
        refused(None, mail.release, task, error=LeaseLost)
    assert sorted(mail.take().id for _ in ids) == ids


def test_tasks_by_status_goes_through_them_in_order(mail: QueueHandle) -> None:
    ids = [make_task("ERROR", queue="mail").pk for _ in range(3)]
    make_task("POISON", queue="mail")
    make_task("ERROR", queue="other")
    assert [task.pk for task in mail.tasks_by_status("ERROR")] == ids
    enqueue_many("mail", [{}] * 2_500)  # more than one statement takes
    assert len({task.pk for task in mail.tasks_by_status("CREATED")}) == 2_500
    assert mail.truncate() == 2_504
    refused("is not a status; they are CREATED", list, mail.tasks_by_status("FAILED"), error=ValueError)


@pytest.mark.django_db(databases=["default", "sqlite"])
def test_using_names_the_database() -> None:
    here, there = queue("mail", using="default"), queue("mail", using="sqlite")
    there.put()
    assert here.take() is None
    refused("on database 'sqlite', not of", here.ack, there.token(there.take()))


@pytest.mark.django_db(databases=["default", "sqlite"])
def test_a_queue_with_shards_is_pulled_from_all_of_them(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"mail": {"shards": ["default", "sqlite"]}}}
    mail = queue("mail")
    for _ in range(4):
        mail.put()
    assert mail.statistics().by_status["CREATED"] == 4
    tasks = [mail.take() for _ in range(4)]
    assert {task.port.alias for task in tasks} == {"default", "sqlite"}
    assert mail.take() is None
    refused(r"has shards.*default or", mail.peek, 1)
    for task in tasks:
        mail.ack(mail.token(task))
    assert mail.statistics().by_status["COMPLETED"] == 4


# -- time to live: how long after it is due a task may be started. What moves the due time moves its end, too ----------
TTL = timedelta(minutes=10)


def ttl_left(task: Any) -> timedelta:
    """Return how long after it is due a waiting task may be started, rounded as SQLite counts."""
    found = row(task)
    left = found.expire_time - (found.ready_time or found.next_process_time)
    return timedelta(seconds=round(left.total_seconds(), 1))


def test_a_release_with_a_delay_moves_it_and_a_release_in_place_does_not(mail: QueueHandle) -> None:
    task = taken(mail, ttl=TTL)
    mail.release(task, HOUR)
    assert ttl_left(task) == TTL
    age(HOUR + TTL / 2)
    mail.release(mail.take())  # the place is kept, and so is the time to live
    assert ttl_left(task) == TTL
    age(TTL)
    assert (mail.take(), status(task)) == (None, "POISON")
    # One that has none gets none
    mail.release(other := taken(mail), HOUR)
    assert row(other).expire_time is None


def test_a_member_of_a_group_keeps_what_was_left_when_it_became_the_head(mail: QueueHandle) -> None:
    head, task = mail.put(group="g"), mail.put(group="g", ttl=2 * DAY)
    age(DAY)
    mail.ack(mail.take())
    left = ttl_left(task)
    assert status(head) == "COMPLETED" and DAY / 2 < left <= DAY
    mail.release(mail.take(), 5 * DAY)
    assert ttl_left(task) == left


def test_a_buried_task_never_expires_and_a_kick_gives_its_whole_time_to_live(mail: QueueHandle) -> None:
    for end in [lambda _: mail.bury(mail.take()), lambda task: mail.bury(task.pk), lambda _: age(HOUR) or mail.take()]:
        task = mail.put(ttl=TTL)
        end(task)
        age(DAY)
        assert status(task) == "POISON"
        mail.kick(1)
        assert ttl_left(task) == TTL
        mail.ack(mail.take())


def test_verbs_of_operators_move_it_with_the_due_time(mail: QueueHandle) -> None:
    task, tasks = taken(mail, ttl=TTL), Task.objects.filter(queue="mail")
    task.fail("no", retry=False)
    age(DAY)
    tasks.reprocess()
    assert ttl_left(task) == TTL
    age(TTL / 2)
    mail.take()
    age(TTL)
    tasks.release_all()
    assert ttl_left(task) == TTL
    for verb in (["snooze", "--for=1h"], ["run-now"]):
        output_of("taskqueue", *verb, f"--id={task.id}", "--yes")
        assert ttl_left(task) == TTL
