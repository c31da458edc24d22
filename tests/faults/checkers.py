"""One function for each promise. Each returns the violations that it finds in the evidence, as sentences."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property, partial
from operator import itemgetter
from statistics import median, median_high
from typing import NamedTuple

from django_dbtaskqueue.core.states import EDGES, TERMINAL
from tests.faults.history import Change
from tests.faults.ledger import Event
from tests.faults.sizes import LEASE_S, MAX_RUNNING, RATES, STEPS

# Operators cancel tasks, and nothing else; but rows that have ended may leave.
USED = [edge for edge in EDGES if edge.actor != "operator" or edge.target is None or edge.verb == "cancel"]
LEGAL = {(str(source), edge.target and str(edge.target)) for edge in USED for source in edge.sources}
ENDED = {str(status) for status in TERMINAL}
LIVE = {"CREATED", "PROCESSING"}
RETURN_S = 3.0  # from the return of the database to the next checkout
WARM_S, LIVED_S = 30.0, 60.0  # of a process whose needs are compared: not counted, and at least
SPREAD = 2  # threads or files by which a process may grow
SLOPE, SLOPE_S = 0.5 * 2**20, 120.0  # bytes of memory a minute, over so many seconds at least
CLOCK_S = 0.05  # a ledger's clock and the database's may differ by so much
CANCELLED = "Cancelled while the poller was stopping"
# Errors of a connection. A processor that does not touch the database cannot have caused one.
OWN = {"ticks", "unique"}  # queues with references that no producer chose
WRITERS = {"effects", "steps"}  # queues whose processors use the database
KEPT = {"evented", "processes"}  # queues that keep what has completed in the history
START_S = 0.5  # between the check of a lease and the first line of a processor
STOP_S = 4 * LEASE_S  # from a cancel to the end of the code: a poller may be paused before it hears of it
OUTAGE_ERRORS = ("OperationalError", "InterfaceError", "AdminShutdown", "InternalError")


@dataclass(frozen=True)
class Row:
    """A task as it stood at the end of the run."""

    task: int
    queue: str
    reference: str
    status: str
    attempt: int
    result: object = None
    history: bool = False  # it stands in the history table


class Needs(NamedTuple):
    """What a process of a poller held at one moment."""

    clock: float
    pid: int
    role: str
    memory: int  # bytes
    threads: int
    files: int


@dataclass
class Evidence:
    history: Sequence[Change] = ()
    events: Sequence[Event] = ()
    rows: Sequence[Row] = ()
    moved: Sequence[Change] = ()  # of the queue with shards, in both databases
    shards: Sequence[Row] = ()  # its tasks
    received: Sequence[str] = ()  # references of what came over the bridge
    bookings: Mapping[str, int] = field(default_factory=dict)  # amounts, by reference
    attempts: Sequence[tuple[int, int, str]] = ()  # task, fence and error (its class, or a text) of each attempt
    deleted: int = 0  # as the package counts deletions
    capacities: Mapping[str, int] = field(default_factory=dict)
    budgets: Mapping[str, int] = field(default_factory=dict)
    expected: Mapping[str, str | None] = field(default_factory=dict)  # the last status of each kind; None: no row
    died: Mapping[int, Sequence[float]] = field(default_factory=dict)  # when killed processes of that number died
    stopped: Mapping[int, Sequence[float]] = field(default_factory=dict)  # when they were stopped beyond their lease
    outages: Sequence[tuple[float, float]] = ()  # times in which some pollers, or all, had no database
    back: Sequence[float] = ()  # when the database was there again for all
    drained: float = 0.0  # seconds from the last fault until all was done
    needs: Sequence[Needs] = ()
    slowness: float = 1.0  # of the machine, during the run: limits in seconds grow with it

    @cached_property
    def transactions(self) -> dict[str, tuple[list[str], str]]:
        found = {event.values["transaction"]: (event.values["references"], "unknown") for event in self.of("invoked")}
        for kind in ("ok", "rolled back"):
            for event in self.of(kind):
                name = event.values["transaction"]
                found[name] = (found[name][0], kind)
        return found

    @cached_property
    def inserted(self) -> Counter[tuple[str, str | None]]:
        return Counter((change.queue, change.reference) for change in self.history if change.old_status is None)

    @cached_property
    def references(self) -> set[str | None]:
        return {reference for _, reference in self.inserted} | {change.reference for change in self.moved}

    @cached_property
    def by_queue(self) -> Counter[str]:
        """How many tasks were enqueued, and moved to a shard."""
        return Counter(change.queue for change in (*self.history, *self.moved) if change.old_status is None)

    @cached_property
    def own(self) -> set[int]:
        """Tasks whose references no producer chose."""
        return {change.task for change in self.history if change.queue in OWN}

    @cached_property
    def asked(self) -> set[str]:
        """References that an operator may have cancelled."""
        return {event.values["reference"] for event in self.of("cancel")}

    @cached_property
    def cancels(self) -> dict[str, float]:
        """When a cancel of a reference was told to have had an effect."""
        return {event.values["reference"]: event.clock for event in self.of("cancelled") if event.values["done"]}

    @cached_property
    def starts(self) -> dict[tuple[int, int], Event]:
        return {(event.values["task"], event.values["fence"]): event for event in self.of("start")}

    @cached_property
    def ends(self) -> dict[tuple[int, int], float]:
        """When a processor had its outcome, by task and fence: the first time, if its process died and it ran again."""
        ends = [((event.values["task"], event.values["fence"]), event.clock) for event in self.of("end")]
        return dict(sorted(ends, key=itemgetter(1), reverse=True))

    @cached_property
    def held(self) -> list[tuple[int, float]]:
        """Of each task that held the interpreter of a process: the process, and when it began."""
        return [(one.pid, one.clock) for one in self.of("start") if str(one.values["reference"]).startswith("hold-")]

    @cached_property
    def by_task(self) -> dict[int, list[Change]]:
        found: dict[int, list[Change]] = defaultdict(list)
        for change in self.history:
            found[change.task].append(change)
        return found

    def of(self, kind: str) -> Iterator[Event]:
        return (event for event in self.events if event.kind == kind)


Checker = Callable[[Evidence], Iterable[str]]
CHECKERS: dict[str, Checker] = {}


def checker(promise: str) -> Callable[[Checker], Checker]:
    """Register a checker under the name of what must not be found."""

    return lambda function: CHECKERS.setdefault(promise, function)


def check(evidence: Evidence) -> dict[str, list[str]]:
    return {promise: list(function(evidence)) for promise, function in CHECKERS.items()}


# What a single change of a task may not be, and how that is said.
WRONG_CHANGES: tuple[tuple[str, Callable[[Change], bool], str], ...] = (
    ("lease overlap", lambda one: one.old_status == "PROCESSING" and one.early > 0, "taken {0.early:.3f} s too early"),
    ("early start", lambda one: one.old_status == "CREATED" and one.early > 0, "taken {0.early:.3f} s before its time"),
    # The fence rises by one with each checkout, and changes at no other time.
    ("fence", lambda one: one.step not in (None, 0, 1), "fence {0.old_fence} -> {0.new_fence}"),
    ("fence", lambda one: one.step == 1 and one.new_status != "PROCESSING", "a new fence at {0.new_status}"),
    ("fence", lambda one: one.step == 0 and one.edge == ("CREATED", "PROCESSING"), "taken without a new fence"),
    # The status changes only in the documented ways; a task that has ended stays as it is, or leaves.
    ("illegal edge", lambda one: one.edge[0] not in (None, one.edge[1]) and one.edge not in LEGAL, "{0.edge}"),
    # A checkout charges one attempt, within the budget; only a task that goes back into the queue is given one.
    ("attempts", lambda one: one.is_checkout and one.charge != 1, "a checkout charged {0.charge} attempts"),
    ("attempts", lambda one: one.is_checkout and one.new_attempt > one.budget, "attempt {0.new_attempt} of {0.budget}"),
    ("attempts", lambda one: not one.is_checkout and one.charge > 0, "charged {0.charge} without a checkout"),
    ("attempts", lambda one: one.charge < 0 and one.new_status not in LIVE, "given {0.charge}, became {0.new_status}"),
)


def wrong_changes(evidence: Evidence, promise: str) -> Iterator[str]:
    rules = [(broken, words) for name, broken, words in WRONG_CHANGES if name == promise]
    for change in evidence.history:
        for broken, words in rules:
            if broken(change):
                yield f"task {change.task}: {words.format(change)} ({change.seq})"


CHECKERS |= {name: partial(wrong_changes, promise=name) for name, *_ in WRONG_CHANGES}


@checker("lost")
def lost(evidence: Evidence) -> Iterator[str]:
    """What a producer was told is committed is there."""
    for name, (references, answer) in evidence.transactions.items():
        missing = [reference for reference in references if reference not in evidence.references]
        if answer == "ok" and missing:
            yield f"transaction {name} was acknowledged, and {missing[:3]} never came"


@checker("phantom")
def phantom(evidence: Evidence) -> Iterator[str]:
    """Nothing is there that nobody enqueued, or that was rolled back."""
    known = [references for references, answer in evidence.transactions.values() if answer != "rolled back"]
    started = {event.values["reference"] for event in evidence.of("start") if event.values["task"] not in evidence.own}
    chosen = {reference for queue, reference in evidence.inserted if queue not in OWN}
    chosen |= {change.reference for change in evidence.moved} | {*evidence.received} | started
    for reference in sorted(chosen.difference(*known), key=str):
        yield f"{reference} was enqueued by nobody, or rolled back, and is there or was started"


@checker("torn enqueue")
def torn(evidence: Evidence) -> Iterator[str]:
    """A transaction's own row and all its tasks are there, or nothing of it is."""
    for name, (references, _) in evidence.transactions.items():
        present = [reference for reference in references if reference in evidence.references]
        if len(present) != (len(references) if name in evidence.bookings else 0):
            there = "is" if name in evidence.bookings else "is not"
            yield f"transaction {name} {there} there, and {len(present)} of its {len(references)} tasks are"


@checker("duplicate reference")
def duplicate(evidence: Evidence) -> Iterator[str]:
    """A reference is inserted once in its queue."""
    for (queue, reference), number in evidence.inserted.items():
        if number > 1 and queue != "unique":
            yield f"{reference} was inserted {number} times into {queue}"


@checker("stale write accepted")
def stale_write(evidence: Evidence) -> Iterator[str]:
    """The outcome that a task has under a fence came from the processor that was started with this fence."""
    errors = {(task, number): error for task, number, error in evidence.attempts}
    for change in evidence.history:
        if change.old_status != "PROCESSING" or change.is_checkout:
            continue
        if change.new_status is not None and change.new_fence != change.old_fence:
            yield f"task {change.task} went from fence {change.old_fence} to {change.new_fence} without a checkout"
        given_back = change.new_status in LIVE and (change.new_attempt or 0) < (change.old_attempt or 0)
        rescued = change.new_status == "ERROR" and change.due is not None and change.due <= change.clock
        # A processor that uses the database may fail in the middle of a transaction.
        key = (change.task, change.fence)
        failed = change.queue in WRITERS and key in errors
        failed |= change.new_status == "POISON" and change.reference in evidence.asked  # an operator wrote it
        # Its poller saw the process end; a processor that goes on to its end was alive.
        failed |= errors.get(key, "").endswith(".ProcessDied") and key not in evidence.ends
        failed |= errors.get(key) == CANCELLED  # a second SIGTERM does not wait for threads
        if given_back or rescued or failed:
            continue
        ended = evidence.ends.get(key)
        if ended is None or ended > change.clock + CLOCK_S:
            yield (
                f"task {change.task} of {change.queue} became {change.new_status or 'deleted'} under fence "
                f"{change.fence}, whose processor had not ended ({change.seq}, error: {errors.get(key)})"
            )


@checker("attempt charged for an outage")
def charged_for_outage(evidence: Evidence) -> Iterator[str]:
    """An error of the database fails a task only if its processor had begun and uses the database."""
    queues = {changes[0].task: changes[0].queue for changes in evidence.by_task.values()}
    for task, number, error in evidence.attempts:
        could_fail = queues.get(task) in WRITERS and (task, number) in evidence.starts
        if not could_fail and error.rpartition(".")[2] in OUTAGE_ERRORS:
            yield f"task {task} of {queues.get(task)} spent attempt {number} on {error}"


@checker("outcome without a run")
def outcome_without_run(evidence: Evidence) -> Iterator[str]:
    """A completed task was run to its end at least once under the fence that was accepted."""
    for change in evidence.history:
        if change.new_status == "COMPLETED" and (change.task, change.fence) not in evidence.ends:
            yield f"task {change.task} is COMPLETED under fence {change.fence}, and no processor ended under it"


@checker("effect not exactly once")
def effects(evidence: Evidence) -> Iterator[str]:
    """In atomic mode the effect commits with the outcome: once for each accepted run that ends or goes back."""
    runs = {"ok": 1, "slow": 1, "again": 2}
    for row in evidence.rows:
        kind = row.reference.partition("-")[0]
        if row.queue == "effects" and row.status == "COMPLETED" and kind in runs:
            amount = evidence.bookings.get(row.reference)
            if amount != runs[kind]:
                yield f"{row.reference}: the effect happened {amount} times instead of {runs[kind]}"


@checker("capacity breach")
def capacity(evidence: Evidence) -> Iterator[str]:
    """A queue with a capacity never holds more live tasks."""
    for queue, most in evidence.capacities.items():
        live = peak = 0
        for change in evidence.history:
            if change.queue == queue:
                live += (change.new_status in LIVE) - (change.old_status in LIVE)
                peak = max(peak, live)
        if peak > most:
            yield f"queue {queue} held {peak} live tasks of {most}"


@checker("FIFO inversion")
def fifo(evidence: Evidence) -> Iterator[str]:
    """In a group a task starts only when all that were enqueued before it have ended."""
    # By group, as inserted: one producer at a time writes to it.
    waiting: dict[str, dict[int, None]] = defaultdict(dict)
    for task, changes in sorted(evidence.by_task.items()):
        if changes[0].group is not None and changes[0].queue == "grouped":
            waiting[changes[0].group][task] = None
    for change in evidence.history:
        if change.group is None or change.queue != "grouped":
            continue
        line = waiting[change.group]
        if change.is_checkout and (head := next(iter(line), None)) is not None and change.task > head:
            yield f"group {change.group}: task {change.task} was taken while {head} had not ended ({change.seq})"
        if change.new_status is None or change.new_status in ENDED:
            line.pop(change.task, None)


@checker("conservation difference")
def conservation(evidence: Evidence) -> Iterator[str]:
    """What was enqueued is in the table, in the history, or counted as deleted."""
    enqueued, history = sum(evidence.inserted.values()), sum(row.history for row in evidence.rows)
    hot = len(evidence.rows) - history
    if enqueued != hot + history + evidence.deleted:
        yield f"{enqueued} were enqueued; {hot} are there, {history} in the history, {evidence.deleted} deleted"


@checker("wrong end")
def wrong_end(evidence: Evidence) -> Iterator[str]:
    """Each task ends as its kind says, and none is left."""
    rows = {row.reference: row for row in evidence.rows}
    for _, reference in evidence.inserted:
        kind = str(reference).partition("-")[0]
        row = rows.get(str(reference))
        status = row.status if row is not None else None
        if kind in evidence.expected and status != evidence.expected[kind]:
            place = "" if row is None else f" of {row.queue}, after {row.attempt} attempts,"
            yield f"{reference}{place} ended as {status} instead of {evidence.expected[kind]}"


@checker("answer of another task")
def own_result(evidence: Evidence) -> Iterator[str]:
    """A task has the result that its own processor returned under the fence that was accepted."""
    for row in evidence.rows:
        changes = evidence.by_task.get(row.task)
        if changes and row.status == "COMPLETED" and row.queue != "bridged":
            wanted = [changes[0].reference, changes[-1].fence]
            if row.result != wanted:
                yield f"task {row.task} of {row.queue} has the result {row.result}, not {wanted}"


@checker("started after its lease")
def stale_start(evidence: Evidence) -> Iterator[str]:
    """A task that waited in memory until its lease ran out, and that another poller took, is not started.

    A process that is stopped, or whose interpreter a task holds, may have looked at a lease just before: one task, or a
    batch, for each time.
    """
    met = set[tuple[int, float]]()
    for change in evidence.history:
        start = evidence.starts.get((change.task, change.fence))
        if change.queue == "effects":  # its transaction begins first, and may have to wait
            continue
        if change.is_checkout and start is not None and start.clock > change.clock + START_S:
            late = start.clock - change.clock
            times = [*evidence.stopped.get(start.pid, ()), *(at for pid, at in evidence.held if pid == start.pid)]
            stops = {(start.pid, at) for at in times if at < change.clock and start.clock < at + 2 * LEASE_S} - met
            if stops:
                met |= {min(stops)} if change.queue != "batched" else set()
                continue
            yield f"task {change.task} of {change.queue} was started {late:.3f} s after fence {change.fence} had ended"


@checker("started before its parents")
def workflows(evidence: Evidence) -> Iterator[str]:
    """A task of a workflow is taken when all that it waits for has ended; one that is cut is never taken."""
    ended = {change.reference: change.seq for change in evidence.history if change.new_status in ENDED}
    graph = {child: names for event in evidence.of("invoked") for child, names in event.values.get("after", {}).items()}
    for change in evidence.history:
        if change.is_checkout and change.reference in graph:
            open_ones = [name for name in graph[change.reference] if ended.get(name, change.seq) >= change.seq]
            if open_ones or change.reference.startswith("cut"):
                yield f"{change.reference} was taken while {open_ones} had not ended ({change.seq})"


@checker("step not exactly once")
def steps(evidence: Evidence) -> Iterator[str]:
    """Each step of a completed task has its effect once."""
    for row in evidence.rows:
        amounts = [evidence.bookings.get(f"{row.reference} {step}") for step in STEPS]
        if row.queue == "steps" and row.status == "COMPLETED" and amounts != [1] * len(STEPS):
            yield f"the steps of {row.reference} happened {amounts} times"


@checker("tick without its task")
def ticks(evidence: Evidence) -> Iterator[str]:
    """From the first tick of the schedule to the last one each second has one task."""
    found: Counter[int] = Counter()
    for (queue, reference), number in evidence.inserted.items():
        if queue == "ticks":
            found[round(datetime.fromisoformat(str(reference).partition("@")[2]).timestamp())] += number
    for second in range(min(found, default=0), max(found, default=-1) + 1):
        if found[second] != 1:
            yield f"the tick of {datetime.fromtimestamp(second, UTC)} has {found[second]} tasks"


@checker("limit breach")
def limits(evidence: Evidence) -> Iterator[str]:
    """No more leases hold than ``max_running`` allows, in a queue or in each of its groups."""
    for change in evidence.history:
        if change.is_checkout and change.running > MAX_RUNNING.get(change.queue, change.running):
            yield f"{change.running} tasks of {change.queue}, group {change.group}, ran at a time ({change.seq})"


@checker("rate breach")
def rates(evidence: Evidence) -> Iterator[str]:
    """In no time more tasks start than the rate allows. A start is in its transaction, somewhere."""
    put_off = {(change.task, change.transaction) for change in evidence.history if change.new_status == "CREATED"}
    starts: dict[tuple[str, str | None], list[Change]] = defaultdict(list)
    for change in evidence.history:
        if change.is_checkout and change.queue in RATES and (change.task, change.transaction) not in put_off:
            starts[change.queue, change.group].append(change)
    for (queue, group), line in starts.items():
        rate, burst = RATES[queue]
        for first in range(len(line)):
            some = line[first : first + 10 * burst]
            began, ended = some[0].began, 0.0
            for number, one in enumerate(some, 1):
                began, ended = min(began, one.began), max(ended, one.committed or one.clock)
                if number > burst + rate * (ended - began):
                    yield f"{number} tasks of {queue}, group {group}, started in {ended - began:.3f} s ({one.seq})"
                    break


@checker("two of a kind")
def unique(evidence: Evidence) -> Iterator[str]:
    """Of equal payloads one task lives at a time, and each caller was given one that is there."""
    live: dict[str | None, int] = {}
    for change in evidence.history:
        if change.queue == "unique" and change.old_status is None:
            if change.reference in live:
                yield f"task {change.task} was inserted while {live[change.reference]} lived"
            live[change.reference] = change.task
        elif change.queue == "unique" and change.new_status in ENDED:
            live.pop(change.reference, None)
    for event in evidence.of("asked"):
        if event.values["task"] not in evidence.own:
            yield f"a caller was given task {event.values['task']}, which never came"


@checker("cancel without effect")
def cancels(evidence: Evidence) -> Iterator[str]:
    """What was cancelled is POISON, and its code ends. Nothing else is cancelled but tasks whose parent failed."""
    for row in evidence.rows:
        if row.reference in evidence.cancels and row.status != "POISON":
            yield f"{row.reference} was cancelled, and is {row.status}"
    for change in evidence.history:
        cut = str(change.reference).startswith("cut")
        if change.edge == ("CREATED", "POISON") and not cut and change.reference not in evidence.asked:
            yield f"{change.reference} was cancelled by nobody ({change.seq})"
    for event in evidence.of("alive"):
        told = evidence.cancels.get(event.values["reference"])
        if told is not None and (late := _seconds(evidence, told, event.clock)) > STOP_S * evidence.slowness:
            yield f"{event.values['reference']} ran {late:.1f} s after it was cancelled"


@checker("history differs")
def kept(evidence: Evidence) -> Iterator[str]:
    """What completes in a queue that keeps its history leaves the table, and is in the history once."""
    hot = {row.task for row in evidence.rows if not row.history}
    found = Counter(row.task for row in evidence.rows if row.history)
    left = {change.task: change for change in evidence.history if change.queue in KEPT and change.new_status is None}
    for task in {*left, *found}:
        deleted = task in left and str(left[task].reference).startswith(("delete", "gone"))
        if found[task] != (not deleted) or task in hot:
            yield f"task {task} is {found[task]} times in the history, and {'' if task in hot else 'not '}in the table"


@checker("moved task not exactly once")
def moves(evidence: Evidence) -> Iterator[str]:
    """A task that moves between shards is on one of them, and completes once."""
    completed = Counter(change.reference for change in evidence.moved if change.new_status == "COMPLETED")
    rows = Counter(row.reference for row in evidence.shards)
    for reference in sorted({str(change.reference) for change in evidence.moved}):
        if (rows[reference], completed[reference]) != (1, 1):
            yield f"{reference} is {rows[reference]} times on the shards, and completed {completed[reference]} times"


@checker("sent task not exactly once")
def bridge(evidence: Evidence) -> Iterator[str]:
    """What the bridge completed has arrived once, and nothing has arrived twice."""
    received = Counter(evidence.received)
    sent = {row.reference for row in evidence.rows if row.queue == "bridged" and row.status == "COMPLETED"}
    for reference in sorted(sent | {*received}):
        if received[reference] != 1:
            yield f"{reference} has arrived {received[reference]} times"


@checker("budget")
def budget(evidence: Evidence) -> Iterator[str]:
    """A task that kills its process ends after exactly its attempts."""
    for row in evidence.rows:
        if row.status == "ERROR" and row.queue in evidence.budgets and row.attempt != evidence.budgets[row.queue]:
            yield f"{row.reference} ended in ERROR after {row.attempt} of {evidence.budgets[row.queue]} attempts"


@checker("slow return")
def slow_return(evidence: Evidence) -> Iterator[str]:
    """When the database is back, the next task is taken soon, unless the next outage comes first."""
    limit = RETURN_S * evidence.slowness
    for moment, waited in first_checkouts(evidence).items():
        if waited > limit and not any(moment <= began <= moment + limit for began, _ in evidence.outages):
            yield f"the first checkout came {waited:.1f} s after the database, more than {limit:.1f} s"


def first_checkouts(evidence: Evidence) -> dict[float, float]:
    """Return how long after each return of the database the next task was taken, if one was."""
    clocks = sorted(change.clock for change in evidence.history if change.is_checkout)
    places = {moment: bisect_left(clocks, moment) for moment in evidence.back}
    return {moment: clocks[place] - moment for moment, place in places.items() if place < len(clocks)}


def middle(values: Sequence[float]) -> float:
    return median_high(values) if values else 0.0


@checker("growth")
def growth(evidence: Evidence) -> Iterator[str]:
    """A process that lives long needs no more threads, files (so connections) and memory at its end than before."""
    by_process: dict[int, list[Needs]] = defaultdict(list)
    for needs in evidence.needs:
        by_process[needs.pid].append(needs)
    for pid, samples in by_process.items():
        warm_at = samples[0].clock + WARM_S * evidence.slowness
        warm = [needs for needs in samples if needs.clock >= warm_at]
        if not warm or warm[-1].clock - warm[0].clock < LIVED_S:
            continue
        third = len(warm) // 3
        first, last = warm[:third], warm[-third:]
        for name in ("threads", "files"):
            before, after = (min(getattr(needs, name) for needs in part) for part in (first, last))
            if after > before + SPREAD:
                yield f"{warm[0].role} {pid} went from {before} to {after} {name}"
        minutes = (last[0].clock - first[0].clock) / 60
        grown = (median(needs.memory for needs in last) - median(needs.memory for needs in first)) / minutes
        if grown > SLOPE and warm[-1].clock - warm[0].clock >= SLOPE_S:
            yield f"{warm[0].role} {pid} grew by {grown / 2**20:.2f} MiB a minute"


def restarts(evidence: Evidence) -> list[float]:
    """Return, for each start that a dead process left without an end, the seconds until the task was taken again."""
    return [_seconds(evidence, died, change.clock) for change, died in _taken_again(evidence)]


def end_ratios(evidence: Evidence) -> list[float]:
    """Return, for each of these tasks that ended in its next run, how much longer that took than it must.

    It must take the lease of the dead process, and the time of the run itself.
    """
    return [
        _seconds(evidence, died, evidence.ends[run]) / (LEASE_S + evidence.ends[run] - evidence.starts[run].clock)
        for run, died in {(change.task, change.new_fence): died for change, died in _taken_again(evidence)}.items()
        if run in evidence.starts and run in evidence.ends
    ]


def _taken_again(evidence: Evidence) -> Iterator[tuple[Change, float]]:
    """Yield the checkouts of what dead processes left, with the time of the death."""
    for change in evidence.history:
        start = evidence.starts.get((change.task, change.fence))
        if change.is_checkout and change.old_status == "PROCESSING" and start is not None:
            deaths = [died for died in evidence.died.get(start.pid, ()) if start.clock <= died < change.clock]
            if deaths:
                yield change, min(deaths)


def _seconds(evidence: Evidence, began: float, ended: float) -> float:
    """Return the seconds between two times in which all had a database."""
    return ended - began - sum(max(0.0, min(back, ended) - max(gone, began)) for gone, back in evidence.outages)


# What may not take longer than so many seconds, or times as long as it must, on a machine without other work.
SLOW: dict[str, tuple[float, Callable[[Evidence], list[float]], str]] = {
    "slow drain": (20.0, lambda one: [one.drained], "all was done {:.1f} s after the last fault, more than {:.1f} s"),
    # Half of the tasks of killed processes run again within little more than a lease, outages not counted,
    "slow restart": (1.2 * LEASE_S, restarts, "half of them waited {:.1f} s or more, more than {:.1f} s"),
    # and end in little more than a lease and their own run time: none waits for others.
    "slow end": (1.5, end_ratios, "half of them took {:.1f} times as long as they must, or more; {:.1f} is allowed"),
}


def too_slow(evidence: Evidence, promise: str) -> Iterator[str]:
    most, measure, words = SLOW[promise]
    limit, took = most * evidence.slowness, middle(measure(evidence))
    if took > limit:
        yield words.format(took, limit)


CHECKERS |= {name: partial(too_slow, promise=name) for name in SLOW}
