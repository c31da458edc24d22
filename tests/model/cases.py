"""How large the machines are that are searched, and what breaks if a precaution is left out."""

from typing import NamedTuple

from tests.model.protocol import ALONE, LIMIT, ORDER, RESCUED, SLOTS, STALE, Size
from tests.model.search import CIRCLE, STUCK

# Of each fault there is at most one. It may come at any moment.
SMALL = {"a group of two": Size(tasks=2, grouped=2), "one of two at a time": Size(tasks=2, limit=1)}
LARGE = {  # without kicks: so both take less than a minute
    "a group of two, and one more": Size(grouped=2, kicks=0),
    "one of three at a time": Size(limit=1, kicks=0),
}
LARGEST = {f"{name}, with kicks": size._replace(kicks=1) for name, size in LARGE.items()}  # seven minutes
TWO = Size(tasks=2, lost_answers=0)
LIMITED, GROUP = TWO._replace(limit=1), TWO._replace(grouped=2)
MODELLED = {"enqueue", "checkout", "renew", "complete", "retry", "fail", "release", "rescue", "cancel", "kick"}
NOT_MODELLED = {  # of ``core.states.EDGES``
    "replace", "replace_running", "touch", "complete_delete", "reenqueue", "poison", "park", "unpark", "suspend",
    "signal", "release_all", "reprocess", "mark_poison", "unpoison", "run_now", "snooze", "change_priority", "move",
    "edit", "put_back", "delete", "housekeep",
}  # fmt: skip


class Variant(NamedTuple):
    """A protocol without one precaution."""

    says: str
    breaks: str
    size: Size = TWO


VARIANTS = {
    "no fence": Variant("a settle asks for the status only", STALE, TWO._replace(cancels=0)),
    "fence that resets": Variant("the fence is `attempt`, which a kick sets to 0, and not `total_attempt`", STALE),
    "settle without status": Variant("a settle asks for the fence only", STALE),
    "rescue without lock": Variant("a rescue looks at a lease without a lock on its row", RESCUED),
    "renewal after expiry": Variant("a lease that is over leaves the limit, but can be renewed", LIMIT, LIMITED),
    "limit counted before the commit": Variant("the limit is unlocked by the count, not the commit", LIMIT, LIMITED),
    "group head put twice": Variant("a transaction changes a group without the lock on the group", ORDER, GROUP),
    "cancel that frees a running slot": Variant("a revoked lease frees its slot while its processor runs", SLOTS),
    "head that was just taken": Variant("a task becomes the head in place of one that was just taken", ALONE, GROUP),
    "no rescue": Variant("nobody ends a task whose process died in its last attempt", STUCK),
    "uncharged failure": Variant("a failure gives its attempt back", CIRCLE),
    "pause of two leases": Variant("a poller renews a lease that the limit has forgotten", LIMIT, LIMITED),
}
