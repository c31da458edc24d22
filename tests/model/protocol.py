"""The protocol of the queue as a machine of small steps. ``search`` visits all states that it can reach.

Two pollers, and producers and operators, work on a few tasks. One step is one statement or one commit: what PostgreSQL
shows to others at once. A transaction that reads first and commits later is two steps, and between them all others may
act, as far as its locks let them. A poller may be killed or stand still between any two steps, and the answer to any
commit may be lost. There is no clock: a lease that nobody renews may end at any time.

``Protocol.steps`` says what may happen next. Its methods name the code that they stand for. A variant (``cases``)
leaves out one precaution, and so breaks a promise.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

ABSENT, CREATED, PROCESSING = "ABSENT", "CREATED", "PROCESSING"
COMPLETED, ERROR, POISON = "COMPLETED", "ERROR", "POISON"
NONE, LIVE, OVER, FORGOTTEN = "none", "live", "over", "forgotten"  # a lease; forgotten: over for one lease more
RUNNING, SENT, UNKNOWN, DROPPED = "running", "sent", "unknown", "dropped"  # a job: see ``Job``
OPERATOR = 2  # who acts, beside the pollers 0 and 1
Names = tuple[tuple[int, int], ...]

STALE = "a former holder changes nothing"
RESCUED = "a rescue ends no lease that holds"
ORDER = "a task of a group starts when all before it have ended"
ALONE = "of a group one task runs at a time"
LIMIT = "no more leases hold than the limit allows"
SLOTS = "a poller runs no more tasks than it has slots"
ONE = "a task has one lease at a time"


class Size(NamedTuple):
    """How large the machine is, and how many faults of each kind may come."""

    tasks: int = 3
    grouped: int = 0  # so many of the tasks are a group, in order. They are enqueued in any order, at any time
    limit: int = 0  # max_running; 0: none
    slots: int = 1  # of each poller
    max_attempts: int = 2
    crashes: int = 1
    pauses: int = 1
    lost_answers: int = 1
    cancels: int = 1
    kicks: int = 1


CRASH, PAUSE, LOST_ANSWER, CANCEL, KICK = range(5)  # the last five of ``Size``, in ``State.faults``


class Task(NamedTuple):
    """A row. A task that runs stays ``ready``: its place in the ready order. Behind the head of its group it is not."""

    status: str
    token: int  # total_attempt
    attempt: int
    lease: str
    ready: bool


class Job(NamedTuple):
    """A lease in a poller's memory. Of an UNKNOWN one the checkout's answer was lost, of a SENT one the settle's."""

    task: int
    token: int
    attempt: int
    known: str
    outcome: str = ""  # what was sent


class Change(NamedTuple):
    """A transaction. It holds the lock on its row to the commit, and on the group or the limit that it is about."""

    verb: str
    task: int
    token: int
    after: Task  # its row, when it has committed
    enters: int = -1  # the task that becomes the head of the group
    leaves: int = -1  # the head that it replaces
    names: Names = ()


class Poller(NamedTuple):
    """A process. One that is killed is started again, and remembers nothing."""

    up: bool
    jobs: tuple[Job, ...]
    open: tuple[Change, ...]  # one transaction, or none


class State(NamedTuple):
    tasks: tuple[Task, ...]
    pollers: tuple[Poller, ...]
    others: tuple[Change, ...]  # open transactions of producers and operators
    names: Names  # (task, token) of the leases that the row of the limit names
    faults: tuple[int, ...]  # that may still come

    @property
    def open(self) -> list[Change]:
        return [change for poller in self.pollers for change in poller.open] + list(self.others)

    def holders(self, task: int, *, up: bool) -> bool:
        """Whether a process may renew the lease of a task; ``up``: and does so in time."""
        fence = task, self.tasks[task].token
        for poller in self.pollers:
            for job in poller.jobs:
                if job[:2] == fence and job.known in (RUNNING, SENT) and poller.up >= up:
                    return True
        return False


class Label(NamedTuple):
    """A step in words."""

    text: str
    who: int = OPERATOR
    task: int = 0
    token: int = 0

    def __str__(self) -> str:
        who = ("poller A", "poller B", "a producer" if "enqueue" in self.text else "an operator")[self.who]
        return self.text.format(who=who, task=self.task + 1, token=self.token)


Step = tuple[Label, State | str, bool]  # what happens, the state after it or the broken promise, whether it is a fault


class Protocol:
    """The machine, without the precaution that ``variant`` names, if it does."""

    def __init__(self, size: Size, variant: str = "") -> None:
        self.size, self.variant = size, variant

    def start(self) -> State:
        here = [ABSENT] * self.size.grouped + [CREATED] * (self.size.tasks - self.size.grouped)
        tasks = tuple(Task(status, 0, 0, NONE, True) for status in here)
        return State(tasks, (Poller(True, (), ()),) * 2, (), (), self.size[-5:])

    def steps(self, state: State) -> Iterator[Step]:
        locked = self.locked(state)
        for who, poller in enumerate(state.pollers):
            if not poller.up:
                yield Label("{who} goes on", who), with_poller(state, who, poller._replace(up=True)), False
                continue
            if poller.open:
                yield from self.commit(state, who, poller.open[0])
            else:
                yield from self.checkouts(state, who, locked)
                yield from self.settles(state, who, locked)
                yield from self.rescues(state, who, locked)
            yield from self.renewals(state, who, locked)  # on a thread and a connection of their own
            yield from self.faults(state, who)
        for change in state.others:
            yield from self.commit(state, OPERATOR, change)
        yield from self.operators(state, locked)
        yield from self.time(state)

    def locked(self, state: State) -> set[int]:
        unlocked = "rescue" if self.variant == "rescue without lock" else ""
        return {change.task for change in state.open if change.verb != unlocked}

    # -- what pollers do ---------------------------------------------------------------------------------------------
    def checkouts(self, state: State, who: int, locked: set[int]) -> Iterator[Step]:
        """``flow.checkout``: take a task that is due, past locked rows. This charges the attempt."""
        if sum(job.known in (RUNNING, SENT) for job in state.pollers[who].jobs) >= self.size.slots:
            return
        free = [task for task, row in enumerate(state.tasks) if task not in locked and self.is_due(row)]
        names = state.names
        if free and self.size.limit:
            if self.variant != "limit counted before the commit" and any(one.verb == "take" for one in state.open):
                return  # it waits for the lock on the limit
            free, names = self.within_limit(state, free)
        for task in free:
            row = state.tasks[task]
            after = Task(PROCESSING, row.token + 1, row.attempt + 1, LIVE, True)
            named = tuple(sorted({**dict(names), task: after.token}.items())) if self.size.limit else ()
            change = Change("take", task, after.token, after, names=named)
            if self.size.limit:
                label = Label("{who} locks the limit, counts, and takes task {task}, without a commit", who, task)
                yield label, begun(state, who, change), False
            else:
                yield from self.commit(state, who, change)

    def is_due(self, row: Task) -> bool:
        free = row.ready if row.status == CREATED else row.status == PROCESSING and row.lease != LIVE
        return free and row.attempt < self.size.max_attempts

    def within_limit(self, state: State, free: list[int]) -> tuple[list[int], Names]:
        """``flow.groups``: return which of these tasks may be taken, and the leases that count.

        The number of names is an upper bound. If it leaves no room, the leases are read. One that is over may be
        renewed by a poller that stood still. So it counts until it is forgotten, and is taken over first.
        """
        if len(state.names) < self.size.limit:
            return free, state.names
        held = [(task, token) for task, token in state.names if state.tasks[task][:2] == (PROCESSING, token)]
        live = [one for one in held if state.tasks[one[0]].lease == LIVE]
        over = [one for one in held if state.tasks[one[0]].lease == OVER and self.variant != "renewal after expiry"]
        again = [task for task, _ in over if task in free]
        if again and len(live) < self.size.limit:
            free = again
        elif len(live) + len(over) >= self.size.limit:
            free = []
        return free, (*live, *over)

    def settles(self, state: State, who: int, locked: set[int]) -> Iterator[Step]:
        """``flow.settle``: write an outcome under the fence. A lease that the poller does not know of is given back."""
        for job in state.pollers[who].jobs:
            task, row = job.task, state.tasks[job.task]
            if task in locked:
                continue  # it waits
            fits = row.token == job.token or self.variant == "no fence"
            if self.variant == "fence that resets":
                fits = row.attempt == job.attempt
            if not fits or (row.status != PROCESSING and self.variant != "settle without status"):
                label = Label("{who} finds its lease of task {task}, token {token}, gone", who, task, job.token)
                yield label, without(state, who, job), False
            elif row.token != job.token or row.status != PROCESSING:
                yield Label("{who} settles task {task} under token {token}", who, task, job.token), STALE, False
            else:
                for verb in (job.outcome,) if job.outcome else ("complete", "fail"):
                    yield from self.change(state, who, Change(verb, task, job.token, self.settled(row, verb)))

    def settled(self, row: Task, verb: str) -> Task:
        if verb == "return":
            return Task(CREATED, row.token, row.attempt - 1, NONE, True)
        if verb == "fail" and row.attempt < self.size.max_attempts:
            return Task(CREATED, row.token, row.attempt - (self.variant == "uncharged failure"), NONE, True)
        return Task(COMPLETED if verb == "complete" else ERROR, row.token, 0, NONE, False)

    def renewals(self, state: State, who: int, locked: set[int]) -> Iterator[Step]:
        """``poller.held_leases``: extend leases under the fence, past locked rows; also those that are over.

        With a limit none is extended that the limit has forgotten.
        """
        for job in state.pollers[who].jobs:
            row = state.tasks[job.task]
            if job.known not in (RUNNING, SENT) or job.task in locked:
                continue
            if row.token == job.token and row.status == PROCESSING:
                if row.lease == OVER or (row.lease == FORGOTTEN and self.variant == "pause of two leases"):
                    label = Label("{who} renews its lease of task {task}", who, job.task)
                    yield label, with_task(state, job.task, row._replace(lease=LIVE)), False
            elif self.variant == "cancel that frees a running slot":
                label = Label("{who} finds its lease of task {task} gone while it runs", who, job.task)
                yield label, with_job(without(state, who, job), who, job._replace(known=DROPPED)), True

    def rescues(self, state: State, who: int, locked: set[int]) -> Iterator[Step]:
        """``flow.rescue``: lock a task whose last lease is over, and end it."""
        for task, row in enumerate(state.tasks):
            over = row.status == PROCESSING and row.lease != LIVE and row.attempt >= self.size.max_attempts
            if over and self.variant != "no rescue" and task not in locked and not self.is_group_locked(state, task):
                change = Change("rescue", task, row.token, Task(ERROR, row.token, 0, NONE, False))
                label = Label("{who} locks task {task} to rescue it", who, task)
                yield label, self.with_head(state, who, change), False

    # -- transactions ------------------------------------------------------------------------------------------------
    def change(self, state: State, who: int, change: Change, *, is_fault: bool = False) -> Iterator[Step]:
        """Change a row: at once, or in a transaction that begins with the lock on its group."""
        if change.task >= self.size.grouped:
            for label, after, lost in self.commit(state, who, change):
                yield label, after, lost or is_fault
        elif not self.is_group_locked(state, change.task):
            text = f"{{who}} {change.verb}s task {{task}} and reads its group, without a commit"
            yield Label(text, who, change.task), self.with_head(state, who, change), is_fault

    def is_group_locked(self, state: State, task: int) -> bool:
        if task >= self.size.grouped or self.variant == "group head put twice":
            return False
        return any(one.verb != "take" and one.task < self.size.grouped for one in state.open)

    def with_head(self, state: State, who: int, change: Change) -> State:
        """``flow.groups``: choose the head of the group: a task that runs, one that waits for a retry, the first."""
        grouped = self.size.grouped if change.task < self.size.grouped else 0
        rows = put(state.tasks, change.task, change.after)[:grouped]
        there = [task for task, row in enumerate(rows) if row.status in (CREATED, PROCESSING)]
        ready = [task for task in there if rows[task].ready]
        head = min(there, key=lambda task: rank(task, rows[task]), default=-1)
        leaves = next((task for task in ready if task != head and rows[task].status == CREATED), -1)
        return begun(state, who, change._replace(enters=-1 if head in ready else head, leaves=leaves))

    def commit(self, state: State, who: int, change: Change) -> Iterator[Step]:
        """Show a transaction to others. The answer to it may be lost."""
        task, row, leaves = change.task, state.tasks[change.task], change.leaves
        if any(one.task == leaves and one is not change for one in state.open):
            return  # it waits for that row
        text = f"{{who}} {change.verb}s task {{task}}" + (", token {token}" if who < OPERATOR else "")
        text += ": committed" if change in state.open else ""
        label = Label(text, who, task, change.token)
        if change.verb == "rescue" and row != (PROCESSING, change.token, row.attempt, row.lease, True):
            yield label, closed(state, who, change), True  # the fence was in time
        elif change.verb == "rescue" and row.lease == LIVE:
            yield label, RESCUED, False
        elif change.verb == "take" and row.token == 0 and task < self.size.grouped and waits(state.tasks[:task]):
            yield label, ORDER, False
        else:
            done = closed(self.committed(state, change), who, change)
            job = Job(task, change.token, change.after.attempt, RUNNING)
            if change.verb == "take":
                yield label, with_job(done, who, job), False
                done = with_job(done, who, job._replace(known=UNKNOWN, outcome="return"))
            else:
                ended = [one for one in done.pollers[who].jobs if one[:2] == job[:2]] if who < OPERATOR else []
                for one in ended:
                    done = without(done, who, one)
                yield label, done, False
                if not ended:
                    return
                known = UNKNOWN if change.verb == "return" else SENT
                done = with_job(done, who, ended[0]._replace(known=known, outcome=change.verb))
            if state.faults[LOST_ANSWER]:
                yield label._replace(text=f"{text}. The answer is lost"), spent(done, LOST_ANSWER), True

    def committed(self, state: State, change: Change) -> State:
        rows, enters, leaves = put(state.tasks, change.task, change.after), change.enters, change.leaves
        if leaves >= 0:
            if rows[leaves].status == CREATED:  # looked at again, under the lock on its row
                rows = put(rows, leaves, rows[leaves]._replace(ready=False))
            elif self.variant != "head that was just taken":
                enters = -1
        if enters >= 0 and rows[enters].status == CREATED:
            rows = put(rows, enters, rows[enters]._replace(ready=True))
        names = change.names if change.verb == "take" else state.names
        return State(rows, state.pollers, state.others, names, state.faults)

    # -- what others do ----------------------------------------------------------------------------------------------
    def time(self, state: State) -> Iterator[Step]:
        """A lease ends that no poller renews."""
        for task, row in enumerate(state.tasks):
            if row.status != PROCESSING or row.lease == FORGOTTEN or state.holders(task, up=True):
                continue
            if row.lease == LIVE:
                label = Label("the lease of task {task} ends", task=task)
                yield label, with_task(state, task, row._replace(lease=OVER)), False
            elif self.size.limit:
                label = Label("the lease of task {task} is over for a second lease", task=task)
                yield label, with_task(state, task, row._replace(lease=FORGOTTEN)), False

    def faults(self, state: State, who: int) -> Iterator[Step]:
        _, jobs, open = state.pollers[who]
        if jobs or open:
            if state.faults[CRASH]:
                yield Label("{who} is killed", who), spent(with_poller(state, who, Poller(True, (), ())), CRASH), True
            if state.faults[PAUSE]:
                paused = with_poller(state, who, Poller(False, jobs, open))
                yield Label("{who} stands still", who), spent(paused, PAUSE), True

    def operators(self, state: State, locked: set[int]) -> Iterator[Step]:
        """``flow.enqueue``, and of ``flow.move``: cancel what has not ended, and kick what was cancelled."""
        for task, row in enumerate(state.tasks):
            if task in locked:
                continue
            new = Task(CREATED, row.token, 0, NONE, task >= self.size.grouped)
            poison = Task(POISON, row.token, 0, NONE, False)
            if row.status == ABSENT:
                yield from self.change(state, OPERATOR, Change("enqueue", task, 0, new))
            elif row.status == POISON and state.faults[KICK]:
                yield from self.change(spent(state, KICK), OPERATOR, Change("kick", task, 0, new), is_fault=True)
            elif row.status in (CREATED, PROCESSING) and state.faults[CANCEL]:
                yield from self.change(spent(state, CANCEL), OPERATOR, Change("cancel", task, 0, poison), is_fault=True)

    # -- what must be so in each state -------------------------------------------------------------------------------
    def broken(self, state: State) -> str:
        """Return the promise that a state breaks, or nothing."""
        running = [task for task, row in enumerate(state.tasks) if row.status == PROCESSING]
        if len([task for task in running if task < self.size.grouped]) > 1:
            return ALONE
        if self.size.limit and len([task for task in running if state.tasks[task].lease == LIVE]) > self.size.limit:
            return LIMIT
        if any(len([job for job in poller.jobs if job.known != UNKNOWN]) > self.size.slots for poller in state.pollers):
            return SLOTS
        held = [job[:2] for poller in state.pollers for job in poller.jobs]
        return ONE if len(held) > len(set(held)) else ""

    def work_left(self, state: State) -> int:
        """Return what each step without a fault lowers: of these numbers, the first that it changes."""
        waiting = [row for row in state.tasks if row.status in (CREATED, PROCESSING)]
        jobs = [job for poller in state.pollers for job in poller.jobs]
        over = 0
        for task, row in enumerate(state.tasks):
            if row.status == PROCESSING:
                late = (LIVE, OVER, FORGOTTEN).index(row.lease)
                over += late if state.holders(task, up=True) else 2 - late
        left = 0
        for number in (
            2 * len([row for row in state.tasks if row.status == ABSENT])
            + sum([-1 if change.verb == "enqueue" else 1 for change in state.others]),
            len([job for job in jobs if job.known == UNKNOWN]),
            sum([self.size.max_attempts - row.attempt for row in waiting]),
            len(waiting),
            len([poller for poller in state.pollers if not poller.up]),
            len(jobs),
            over,
            len([poller for poller in state.pollers if not poller.open]),
        ):
            left = left * 16 + number
        return left


def rank(task: int, row: Task) -> tuple[bool, bool, int]:
    return (row.status != PROCESSING, not (row.ready and row.attempt), task)


def waits(rows: tuple[Task, ...]) -> bool:
    return any(row.status in (CREATED, PROCESSING) for row in rows)


def put(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])


# ``_replace`` of a named tuple takes four times the time of its constructor.


def with_task(state: State, task: int, row: Task) -> State:
    tasks, pollers, others, names, faults = state
    return State(put(tasks, task, row), pollers, others, names, faults)


def with_poller(state: State, who: int, poller: Poller) -> State:
    tasks, pollers, others, names, faults = state
    return State(tasks, put(pollers, who, poller), others, names, faults)


def with_job(state: State, who: int, job: Job) -> State:
    up, jobs, open = state.pollers[who]
    return with_poller(state, who, Poller(up, tuple(sorted((*jobs, job))), open))


def without(state: State, who: int, job: Job) -> State:
    up, jobs, open = state.pollers[who]
    return with_poller(state, who, Poller(up, tuple([one for one in jobs if one != job]), open))


def begun(state: State, who: int, change: Change) -> State:
    if who == OPERATOR:
        return with_others(state, (*state.others, change))
    up, jobs, _ = state.pollers[who]
    return with_poller(state, who, Poller(up, jobs, (change,)))


def closed(state: State, who: int, change: Change) -> State:
    if who == OPERATOR:
        return with_others(state, [one for one in state.others if one is not change])
    up, jobs, _ = state.pollers[who]
    return with_poller(state, who, Poller(up, jobs, ()))


def with_others(state: State, changes: Iterable[Change]) -> State:
    tasks, pollers, _, names, faults = state
    return State(tasks, pollers, tuple(sorted(changes)), names, faults)


def spent(state: State, fault: int) -> State:
    tasks, pollers, others, names, faults = state
    return State(tasks, pollers, others, names, put(faults, fault, faults[fault] - 1))
