"""Lanes that are checked out together: one statement for several turns, where a statement each would be the cost."""

from __future__ import annotations

from collections.abc import Iterator

from django_dbtaskqueue.flow.checkout import QueueShare, SkipLocked, next_due_by_queue, take_many
from django_dbtaskqueue.poller.connections import Carrier
from django_dbtaskqueue.poller.free_slots import FIRST, Kind, Rooms
from django_dbtaskqueue.poller.options import Options
from django_dbtaskqueue.poller.queue_state import Lane

MOST = 50  # lanes in one statement


class Company:
    """Finds the lanes that may go along with the one whose turn it is, and takes of all of them."""

    def __init__(self, instance: str, rooms: Rooms, options: Options) -> None:
        self._instance = instance
        self._rooms = rooms
        self._options = options

    def of(self, leader: Lane, room: int, due: list[Lane]) -> tuple[list[Lane], int]:
        """Return who is served in one statement with ``leader``, which comes first, and how much to take in all.

        ``due`` are the lanes in the order of their turns. Each of those chosen has room for all that is asked for, so
        it does not matter who gives how much. Where one lane probably gives it all, it goes alone.
        """
        asked = min(room, leader.settings.batch_size)
        lanes = [leader, *self._companions(leader, asked, due)]
        return (lanes, asked) if len(lanes) > 1 else (lanes, min(asked, self._rooms.most(leader)))

    def _companions(self, leader: Lane, asked: int, due: list[Lane]) -> Iterator[Lane]:
        if len(due) == 1 or leader.more >= asked or self._options.once or not _sociable(leader):
            return
        wanted, port, lease = self._rooms.kind(leader), leader.port, leader.settings.lease
        if wanted is None:
            return
        found, more = 1, leader.more
        rooms: dict[Kind, bool] = {wanted: True}
        for lane in due:
            if lane is leader or not _sociable(lane) or lane.settings.lease != lease:
                continue
            if lane.port.model is not port.model or lane.port.alias != port.alias:
                continue
            kind = self._rooms.kind(lane)
            if kind is None or kind[0] is not wanted[0]:  # somebody may be waiting for room elsewhere
                continue
            if kind not in rooms:
                rooms[kind] = self._rooms.of_lane(lane) >= asked
            if rooms[kind]:
                yield lane
                found += 1
                more += lane.more
                if found == MOST or more >= asked:
                    return

    def take(self, carrier: Carrier, lanes: list[Lane], asked: int) -> list[QueueShare]:
        """Check out of ``lanes`` together; return what came of each."""
        parts = [QueueShare(lane.line, lane.port, self._share(lane, asked)) for lane in lanes]
        take_many(
            carrier.session(lanes[0]),
            parts,
            poller_instance=self._instance,
            limit=asked,
            lease=lanes[0].settings.lease,
            tags=self._options.tags,
        )
        return parts

    def _share(self, lane: Lane, asked: int) -> int:
        return min(asked, lane.settings.batch_size if lane.mean is not None or lane.tried else FIRST)

    def next_dues(self, carrier: Carrier, lanes: list[Lane]) -> dict[str, float]:
        """Return, by queue, the seconds until the first task that is scheduled for later is due, if there is one."""
        priorities = [(lane.queue, priority) for lane in lanes for priority in lane.priorities()]
        return next_due_by_queue(carrier.session(lanes[0]), priorities) if priorities else {}


def _sociable(lane: Lane) -> bool:
    """Whether a lane can be checked out along with others: nothing has to be asked or done for it alone."""
    return (
        type(lane.strategy) is SkipLocked
        and lane.settings.max_wait is None
        and not (lane.unpark or lane.doubtful or lane.closed)
    )
