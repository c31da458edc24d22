"""Leases: extended by their holder only, ended by time, by the operator, or by the death of their process."""

from datetime import timedelta

import pytest
from django.db.models.functions import Now

from django_dbtaskqueue.core.outcomes import Park, Release
from django_dbtaskqueue.core.states import COMPLETED, CREATED, PROCESSING
from django_dbtaskqueue.flow import move, rescue, run, settle
from django_dbtaskqueue.poller.held_leases import renew
from tests.conformance.conftest import SECOND, World
from tests.conformance.test_settle import is_at
from tests.factories import LEASE
from tests.patience import PATIENCE

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"])


def test_touch_by_nothing_does_nothing_and_backwards_is_refused(world: World) -> None:
    lease = world.take()
    before = world.row(lease)
    lease.touch(timedelta(0))
    with pytest.raises(ValueError, match="is negative"):
        lease.touch(timedelta(seconds=-1))
    assert world.row(lease) == before


def test_report_progress_shows_and_changes_nothing_else(world: World) -> None:
    lease = world.take()
    world.age(timedelta(seconds=20))
    before = world.row(lease)
    lease.report_progress(0.25, "a\0b" + "é" * 4000)
    after = world.row(lease)
    assert {name for name in after if after[name] != before[name]} == {"process_result", "last_update_time"}
    assert after["process_result"].startswith("25% a\ufffdb") and len(after["process_result"].encode()) <= 4000
    lease.complete()
    assert world.row(lease)["process_result"] is None


def test_renew_counts_from_now_and_tells_who_lost(world: World) -> None:
    held, taken_over, released, settled = leases = [world.take() for _ in range(4)]
    world.age(LEASE / 2)
    world.tasks.filter(pk=released.id).release_all()
    settled.complete()
    world.tasks.filter(pk=taken_over.id).update(next_process_time=Now())
    world.checkout(5, poller=SECOND)
    before = {lease.id: world.row(lease) for lease in leases}
    lost = renew(world.session, leases, 7200.0)
    assert {lease.id for lease in lost} == {taken_over.id, released.id}
    assert is_at(world.row(held)["next_process_time"], timedelta(hours=2))
    assert all(world.row(lease) == before[lease.id] for lease in lost)
    assert {name for name, value in world.row(held).items() if value != before[held.id][name]} == {"next_process_time"}


def test_an_expired_lease_nobody_took_over_can_be_renewed_and_settled(world: World) -> None:
    lease = world.take()
    world.age(2 * LEASE)
    assert renew(world.session, [lease], 60.0) == []
    assert world.checkout(poller=SECOND) == []
    world.age(2 * LEASE)
    lease.complete()
    assert world.row(lease)["status"] == COMPLETED


def test_release_keeps_the_place_and_does_not_charge(world: World) -> None:
    ids = [world.make(ready_time=timedelta(minutes=-minutes)).id for minutes in (30, 20, 10)]
    taken = world.checkout(2)
    world.make(ready_time=timedelta(minutes=-5))
    assert settle.settle(world.session, [(lease, Release()) for lease in reversed(taken)]) == set(ids[:2])
    again = world.checkout(3, poller=SECOND)
    assert [lease.id for lease in again] == ids
    assert [(lease.attempt, lease.total_attempt) for lease in again] == [(1, 2), (1, 2), (1, 1)]


def test_a_parked_task_waits_uncharged_until_what_it_waits_for_is_there(world: World) -> None:
    lease = world.take(payload_type="Alien")
    reason = run.no_handler("parcels", "Alien")
    assert world.settle(lease, Park(reason))
    row = world.row(lease)
    assert (row["status"], row["attempt"], row["parked_by"], row["ready_time"]) == (CREATED, 0, reason, None)
    assert "Alien" in reason
    assert world.checkout() == []
    assert move.unpark(world.session, "parcels", ["Other"]) == 0
    assert move.unpark(world.session, "other", ["Alien"]) == 0
    assert move.unpark(world.session, "parcels", ["Other", "Alien"]) == 1
    row = world.row(lease)
    assert (row["parked_by"], row["attempt"], is_at(row["ready_time"])) == (None, 0, True)
    (again,) = world.checkout()
    assert (again.id, again.attempt, again.total_attempt) == (lease.id, 1, 2)
    world.make(parked_by="capacity")
    later = world.make(parked_by=run.no_handler("parcels", None), next_process_time=timedelta(hours=1))
    assert move.unpark(world.session, "parcels", ["Alien"], untyped=False) == 0
    assert move.unpark(world.session, "parcels", ["Alien"]) == 1
    row = world.row(later)
    assert (row["parked_by"], is_at(row["ready_time"], timedelta(hours=1))) == (None, True)
    assert world.checkout() == []


def test_spent_finds_dead_tasks_on_their_last_attempt(world: World) -> None:
    def seconds_left() -> float | None:
        return rescue.seconds_until_exhausted(world.session, "parcels")

    over = timedelta(hours=-1)
    world.make(PROCESSING, attempt=4, next_process_time=over)  # the next checkout takes it
    world.make(PROCESSING, attempt=5, next_process_time=over, queue="other")
    world.make(CREATED, attempt=5)
    assert seconds_left() is None
    world.make(PROCESSING, attempt=5, next_process_time=-over)  # alive
    assert 3600 - PATIENCE < (seconds_left() or 0) < 3600.001  # SQLite's days are rounded
    dead = [world.make(PROCESSING, attempt=5, next_process_time=over).id for _ in range(3)]
    assert sorted(row[0] for row in rescue.exhausted(world.session, "parcels")) == dead
    assert len(rescue.exhausted(world.session, "parcels", limit=2)) == 2
    assert -3600 - PATIENCE < (seconds_left() or 0) < -3599.999


def test_a_lease_of_the_task_s_own_length_wins(world: World) -> None:
    task = world.enqueue(lease=timedelta(hours=2))
    (lease,) = world.checkout()
    row = world.row(task)
    assert abs(row["next_process_time"] - row["start_time"] - timedelta(hours=2)) <= timedelta(milliseconds=1)
    assert renew(world.session, [lease], 60.0) == []
    assert is_at(world.row(task)["next_process_time"], timedelta(hours=2))
