"""How many tasks there is room for: in a lane, and for each of its processors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from django_dbtaskqueue import registry
from django_dbtaskqueue.flow.run import Processor
from django_dbtaskqueue.poller.executors import Executor
from django_dbtaskqueue.poller.executors.pool_of_executors import Places
from django_dbtaskqueue.poller.queue_state import Lane
from django_dbtaskqueue.poller.settle_batches import Settler

Kind = tuple[Executor, int, int]
FIRST = 2  # tasks of a queue nobody knows yet, when there is no slot free for more


class Rooms:
    """Measures what may be taken now, and keeps count of what checkouts under way have asked for."""

    def __init__(self, places: Places, settler: Settler) -> None:
        self._places = places
        self._settler = settler
        self._known: dict[Lane, tuple[tuple[Processor, ...], set[Executor], Executor | None]] = {}
        self.everywhere: set[Executor] = set()  # where tasks of any lane looked at so far run
        self.reserved = 0  # tasks asked for by checkouts under way, in all lanes

    def reserve(self, lanes: Iterable[Lane], tasks: int) -> None:
        """Count ``tasks`` as asked for in lanes; a negative number takes them back. Called under the intake's lock."""
        for lane in lanes:
            lane.reserved += tasks
        self.reserved += tasks

    def of_lane(self, lane: Lane) -> int:
        """Return how many tasks to take from a lane now."""
        processors = registry.processors(lane.queue)
        if self.differ(processors):
            room = 0 if lane.reserved else sum(max(0, self.of_processor(lane, each)) for each in processors)
        else:
            room = self.of_processor(lane, processors[0] if processors else None)
        if lane.settings.concurrency is not None:
            held = sum(lease.port is lane.port for lease in self._settler.held.copy())
            room = min(room, lane.settings.concurrency - held - lane.reserved)
        return room

    def of_processor(self, lane: Lane, processor: Processor | None, *, mine: int = 0) -> int:
        """Return how many tasks of a processor to take from a lane now, by who has reserved ``mine`` already."""
        reserved = self.reserved - mine
        ahead = self._ahead(lane)
        room = self._places.slots(processor) + ahead - len(self._settler.done) - reserved
        if (reserved or self._places.waiting(processor)) and room < min(lane.settings.batch_size, ahead / 2):
            return 0  # worth a statement only when the slots run dry or half of what may wait fits
        allowed = self._places.allowed(processor)
        return room if allowed is None else min(room, allowed - lane.reserved + mine)

    def most(self, lane: Lane) -> int:
        """Return how many tasks to take at a time from a lane with room: few until it is known how long they take."""
        executor = self._of(lane)[2]
        if lane.mean is not None or executor is None:
            return lane.settings.batch_size
        free = executor.slots - len(executor.todo) - executor.busy()
        return min(lane.settings.batch_size, max(free, FIRST))

    def differ(self, processors: Sequence[Processor]) -> bool:
        """Whether a queue's processors have room for different numbers of tasks."""
        if len(processors) < 2:
            return False
        places = {self._places.of(processor) for processor in processors}
        return len(places) > 1 or not all(processor.plain for processor in processors)

    def reopened(self, lane: Lane) -> bool:
        """Whether a processor that had no room at the lane's last checkout has some now."""
        return any(self.of_processor(lane, processor) > 0 for processor in lane.closed)

    def behind(self, lane: Lane) -> bool:
        """Whether a lane without room gets some as soon as what waits where it runs is done."""
        processors = registry.processors(lane.queue) or (None,)
        return any(self._places.waiting(each) and self._places.allowed(each) != 0 for each in processors)

    def places(self, lane: Lane) -> set[Executor]:
        """Return where a lane's tasks run."""
        return self._of(lane)[1]

    def kind(self, lane: Lane) -> Kind | None:
        """Return what lanes have in common that have the same room; None for one that has its own."""
        executor = self._of(lane)[2]
        if executor is None or lane.settings.concurrency is not None:
            return None
        return executor, lane.ahead(self._settler.pace), lane.settings.batch_size

    def _ahead(self, lane: Lane) -> int:
        return lane.ahead(None if self._of(lane)[2] is None else self._settler.pace)

    def _of(self, lane: Lane) -> tuple[tuple[Processor, ...], set[Executor], Executor | None]:
        """Return a lane's processors, where they run, and that place if one plain processor does all."""
        processors = registry.processors(lane.queue)
        known = self._known.get(lane)
        if known is None or known[0] != processors:
            places = {self._places.of(each) for each in processors or (None,)}
            simple = len(processors) < 2 and all(each.plain for each in processors)
            known = self._known[lane] = (processors, places, next(iter(places)) if simple else None)
            self.everywhere |= places
        return known
