"""A holder that was stopped beyond its lease goes on: what it writes late changes nothing, and it says so."""

import signal
from pathlib import Path

from django_dbtaskqueue import enqueue
from django_dbtaskqueue.models import Attempt, Task
from tests.chaos.processes import Configure, PollerProcess, Start, expire, until_all
from tests.poller.processes import lines
from tests.support import row_of, until
from tests.testapp.models import Booking

# The queue, what the successor of the holder does, and whether the holder's late outcome is a failure.
FAILING = ("chaos", "runs", True)
CASES = (FAILING, *((queue, then, False) for queue in ("chaos", "ledger") for then in ("runs", "has-finished")))


def stopped_holder(start: Start, mark: Path, tasks: int) -> PollerProcess:
    """Return a poller that was stopped while its processors run; its leases have run out."""
    holder = start("--threads", str(tasks))
    until(lambda: len(lines(mark)) == tasks)
    holder.signal(signal.SIGSTOP)
    expire()
    return holder


def test_a_late_outcome_changes_nothing(audited: None, start: Start, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    tasks, gates = {}, {}
    for queue, successor, fails in CASES:
        reference = f"{queue}-fails-{successor}" if fails else f"{queue}-{successor}"
        Booking.objects.create(reference=reference)
        gates[reference] = tmp_path / reference
        payload = {"do": "hold", "until": str(gates[reference]), "each": True, "bump": True, "mark": str(mark)}
        tasks[reference] = enqueue(queue, reference, {**payload, "fail": fails})

    # Given a stopped holder, and a second poller that took its tasks over, and has finished some
    holder = stopped_holder(start, mark, len(CASES))
    second = start()
    until(lambda: len(lines(mark)) == 2 * len(CASES))
    for reference, gate in gates.items():
        if reference.endswith("finished"):
            Path(f"{gate}.2").touch()
            until_all("COMPLETED", reference=reference)
    before = {reference: row_of(task) for reference, task in tasks.items()}
    for gate in gates.values():
        Path(f"{gate}.1").touch()
    holder.signal(signal.SIGCONT)
    for task in tasks.values():
        holder.until_logged(f"Lease 1 of task {task.pk} of {task.queue} is gone")

    # Then the rows are as the second one left them, which goes on undisturbed
    assert {reference: row_of(task) for reference, task in tasks.items()} == before
    for gate in gates.values():
        Path(f"{gate}.2").touch()
    until_all("COMPLETED")
    for task in Task.objects.all():
        assert (task.result, task.attempt, task.total_attempt) == (2, 2, 2)
        assert f":{second.pid}:" in str(task.poller_instance)
    effects = dict(Booking.objects.values_list("reference", "amount"))
    assert effects == {reference: 1 if reference.startswith("ledger") else 2 for reference in tasks}, "once if atomic"
    assert not Attempt.objects.exists()
    holder.end()
    second.end()


def test_a_late_renewal_does_not_take_the_lease_back(start: Start, queues: Configure, tmp_path: Path) -> None:
    mark, told = tmp_path / "mark", tmp_path / "told"
    queues(lease="6s")
    task = enqueue("chaos", None, {"do": "check", "end": str(told), "mark": str(mark)})
    holder = stopped_holder(start, mark, 1)
    queues(lease="10m")
    start()
    until(lambda: len(lines(mark)) == 2)
    before = row_of(task)
    holder.signal(signal.SIGCONT)
    until(told.exists)  # by the renewal, to the processor
    assert row_of(task) == before
