"""The queue in plain Python: what the state machine compares each database with. Time is a number of seconds."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

LEASE, ENDED = 6000, ("COMPLETED", "ERROR", "POISON")


@dataclass
class Row:
    """A task. ``place`` is its place in line: (due since, counter), or None when it is out of line."""

    id: int
    reference: str | None
    priority: int
    due: float  # next_process_time
    group: str | None
    expires: float | None
    max_attempts: int
    stamp: int = 0  # when ``due`` was set, among all such moments
    place: tuple[float, int] | None = None
    status: str = "CREATED"
    attempt: int = 0
    total: int = 0
    reenqueued: int = 0
    failed: bool = False  # its last outcome was a failure
    ended: float = 0.0

    def seen(self) -> tuple[object, ...]:
        return (self.status, self.attempt, self.total, self.reenqueued, self.place is not None, self.priority)


@dataclass
class Queue:
    """One queue, and every way to change it. Each verb returns what the real one returns."""

    capacity: int
    now: float = 0.0
    rows: dict[int, Row] = field(default_factory=dict)
    history: int = 0
    deleted: int = 0
    enqueued: int = 0
    paused: bool = False
    _placed: int = 0

    def enqueue(self, row: Row, on_duplicate: str, *, keep_due: bool) -> str:
        there = next((one for one in self.rows.values() if row.reference and one.reference == row.reference), None)
        sources = {"replace": ("CREATED",), "replace_running": ("CREATED", "PROCESSING")}.get(on_duplicate, ())
        if there and on_duplicate != "ignore" and (there.status not in sources or there.group != row.group):
            return "duplicate"
        grows = there is None or not (on_duplicate == "ignore" or keep_due or self._is_live(there))
        if grows and sum(map(self._is_live, self.rows.values())) >= self.capacity:
            return "full"
        self._placed += 1
        row.stamp = self._placed
        if there is None:
            self.rows[row.id] = row
            self.enqueued += 1
            self._enter(row, row.due)
            return "new"
        if on_duplicate == "ignore":
            self._regroup({row.group})  # nothing is written, but the group is locked, and its head chosen anew
            return "ignored"
        if there.status == "PROCESSING":
            there.status, there.attempt, there.due = "CREATED", 0, there.place[0]
        there.priority = row.priority
        if not keep_due:
            there.due, there.expires, there.stamp = row.due, row.expires, row.stamp
            there.place = None
            self._enter(there, there.due)
        self._regroup({there.group, row.group})
        return "replaced"

    def _is_live(self, row: Row) -> bool:
        """Whether a task counts for the capacity: one that waits past its time to live does not."""
        expired = row.status == "CREATED" and row.expires is not None and row.expires <= self.now
        return row.status not in ENDED and not expired

    def _enter(self, row: Row, due: float) -> None:
        if row.group is None:
            self._put(row, due)
        else:
            self._regroup({row.group})

    def _put(self, row: Row, due: float) -> None:
        if due > self.now:
            row.place = (due, row.stamp)
        else:
            self._placed += 1
            row.place = (self.now, self._placed)

    def checkout(self, limit: int) -> list[Row]:
        """Take due tasks in line order; those past their time to live end as POISON and are not handed out."""
        if self.paused:
            return []
        due = [row for row in self.rows.values() if self._is_due(row)]
        due.sort(key=lambda row: (row.priority, row.place, row.id))
        taken = []
        for row in due[:limit]:
            row.status, row.attempt, row.total, row.due = "PROCESSING", row.attempt + 1, row.total + 1, self.now + LEASE
            if row.expires is not None and row.expires <= self.now:
                self._end(row, "POISON")
            else:
                taken.append(row)
        return taken

    def _is_due(self, row: Row) -> bool:
        ready = row.place is not None and row.place[0] <= self.now
        return ready and row.due <= self.now and row.attempt < row.max_attempts

    def settle(self, task_id: int, token: int, verb: str, delay: float, group: str | None) -> bool:
        """Settle under a lease; False when it is gone. Either way its group's head is chosen anew."""
        row = self.rows.get(task_id)
        if row is None or row.status != "PROCESSING" or row.total != token:
            self._regroup({group})
            return False
        if verb in ("complete", "poison", "error"):
            self._end(row, {"complete": "COMPLETED", "poison": "POISON", "error": "ERROR"}[verb])
        elif verb == "complete_delete":
            self._drop(row)
        elif verb == "release":
            row.status, row.due, row.attempt = "CREATED", self.now, row.attempt - 1
            self._regroup({row.group})
        elif verb == "reenqueue":
            row.reenqueued += 1
            row.attempt = 0
            self._back(row, delay)
        elif row.attempt >= row.max_attempts:
            self._end(row, "ERROR")
        else:
            self._back(row, delay, failed=True)
        return True

    def _back(self, row: Row, delay: float, *, failed: bool = False) -> None:
        self._placed += 1
        self._move_expiry(row, self.now + delay)
        row.status, row.due, row.stamp, row.failed = "CREATED", self.now + delay, self._placed, failed
        self._put(row, row.due)
        self._regroup({row.group})

    def _move_expiry(self, row: Row, due: float) -> None:
        """Move the end of the time to live with the due time. While a task is held, ``due`` is the lease's end."""
        if row.expires is not None:
            row.expires += due - (row.due if row.place is None else min(row.due, row.place[0]))

    def _end(self, row: Row, status: str) -> None:
        if status != "COMPLETED" and row.place is not None:
            row.due = row.place[0]  # from which its time to live counts if it is brought back
        row.status, row.place, row.ended = status, None, self.now
        self._regroup({row.group})

    def _drop(self, row: Row) -> None:
        del self.rows[row.id]
        self.deleted += 1
        self._regroup({row.group})

    def move(self, verb: str, limit: int | None = None) -> int | str:
        sources = {
            "reprocess": ("ERROR",), "mark_poison": ("ERROR",), "unpoison": ("POISON",), "kick": ("POISON",),
            "cancel": ("CREATED", "PROCESSING"), "release_all": ("PROCESSING",),
        }[verb]  # fmt: skip
        chosen = [row for row in sorted(self.rows.values(), key=lambda row: row.id) if row.status in sources][:limit]
        live = sum(map(self._is_live, self.rows.values()))
        if verb in ("reprocess", "kick") and chosen and live + len(chosen) > self.capacity:
            return "full"
        act = getattr(self, f"_{verb}")
        # All of one act stand at the same moment: among them the smaller id is first.
        self._placed += 1
        for row in chosen:
            act(row)
        if verb not in ("mark_poison", "unpoison"):  # a task that has ended stays out of line
            self._regroup({row.group for row in chosen})
        return len(chosen)

    def _again(self, row: Row) -> None:
        self._move_expiry(row, self.now)
        row.status, row.due, row.place = "CREATED", self.now, (self.now, self._placed)

    def _reprocess(self, row: Row) -> None:
        row.attempt = 0
        self._again(row)

    _kick = _reprocess

    def _release_all(self, row: Row) -> None:
        row.attempt = min(row.attempt, row.max_attempts - 1)
        self._again(row)

    def _mark_poison(self, row: Row) -> None:
        row.status = "POISON"

    def _unpoison(self, row: Row) -> None:
        row.status = "ERROR"

    def _cancel(self, row: Row) -> None:
        if row.status == "PROCESSING" and row.place is not None:
            row.due = row.place[0]
        row.status, row.place, row.ended = "POISON", None, self.now

    def purge(self, wanted: Callable[[Row], bool]) -> int:
        chosen = [row for row in self.rows.values() if wanted(row)]
        for row in chosen:
            self._drop(row)
        return len(chosen)

    def housekeep(self, age: float, to: str) -> int:
        chosen = [row for row in self.rows.values() if row.status in ENDED and row.ended <= self.now - age]
        for row in chosen:
            del self.rows[row.id]
        if to == "history":
            self.history += len(chosen)
        else:
            self.deleted += len(chosen)
        return len(chosen)

    def _regroup(self, groups: Iterable[str | None]) -> None:
        """Of each group one live task is in line: the processed, else the retried, else the first that is due."""
        for group in set(groups) - {None}:
            live = [row for row in self.rows.values() if row.group == group and row.status not in ENDED]
            if not live:
                continue
            head = min(live, key=self._rank)
            for row in live:
                if row is not head and row.status == "CREATED":
                    row.place = None
            if head.place is None:
                self._put(head, head.due)

    def _rank(self, row: Row) -> tuple[object, ...]:
        held = row.place is not None and row.failed and row.attempt > 0
        wait = max(0.0, row.due - self.now)
        stamp = row.stamp if wait else 0  # due in the same second, to a person; never to the clock
        return (row.status != "PROCESSING", not held, wait, stamp, row.priority, row.id)
