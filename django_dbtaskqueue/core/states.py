"""The five statuses and every legal way between them, as data.

The WHERE of each statement, the diagram in the docs and the edge trigger of the tests are all derived from ``EDGES``.
"""

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["TERMINAL", "Status"]


class Status(StrEnum):
    """A task is in exactly one of these."""

    CREATED = "CREATED"
    PROCESSING = "PROCESSING"
    COMPLETED = "COMPLETED"
    ERROR = "ERROR"
    POISON = "POISON"


CREATED, PROCESSING, COMPLETED, ERROR, POISON = Status
TERMINAL = (COMPLETED, ERROR, POISON)  #: statuses that only an operator changes
SIGNAL = "signal"  # the parking reason of a task that waits for a signal without a timeout


@dataclass(frozen=True, slots=True)
class Edge:
    """One legal change. ``target`` None means the row leaves the table (deleted and counted, or moved)."""

    verb: str
    sources: tuple[Status, ...]
    target: Status | None
    actor: str  # producer, poller, holder (of the lease) or operator


EDGES = (
    Edge("enqueue", (), CREATED, "producer"),
    Edge("replace", (CREATED,), CREATED, "producer"),
    Edge("checkout", (CREATED, PROCESSING), PROCESSING, "poller"),
    Edge("renew", (PROCESSING,), PROCESSING, "holder"),
    Edge("touch", (PROCESSING,), PROCESSING, "holder"),
    Edge("complete", (PROCESSING,), COMPLETED, "holder"),
    Edge("complete_delete", (PROCESSING,), None, "holder"),
    Edge("reenqueue", (PROCESSING,), CREATED, "holder"),
    Edge("retry", (PROCESSING,), CREATED, "holder"),
    Edge("fail", (PROCESSING,), ERROR, "holder"),
    Edge("poison", (PROCESSING,), POISON, "holder"),
    Edge("release", (PROCESSING,), CREATED, "holder"),
    Edge("park", (PROCESSING,), CREATED, "holder"),
    Edge("suspend", (PROCESSING,), CREATED, "holder"),
    Edge("unpark", (CREATED,), CREATED, "poller"),
    Edge("signal", (CREATED,), CREATED, "producer"),
    Edge("rescue", (PROCESSING,), ERROR, "poller"),
    Edge("release_all", (PROCESSING,), CREATED, "operator"),
    Edge("replace_running", (CREATED, PROCESSING), CREATED, "producer"),
    Edge("cancel", (CREATED, PROCESSING), POISON, "operator"),
    Edge("reprocess", (ERROR,), CREATED, "operator"),
    Edge("kick", (POISON,), CREATED, "operator"),
    Edge("mark_poison", (ERROR,), POISON, "operator"),
    Edge("unpoison", (POISON,), ERROR, "operator"),
    Edge("run_now", (CREATED,), CREATED, "operator"),
    Edge("snooze", (CREATED,), CREATED, "operator"),
    Edge("change_priority", (CREATED,), CREATED, "operator"),
    Edge("move", (CREATED,), CREATED, "operator"),
    Edge("edit", (ERROR, POISON), CREATED, "operator"),
    Edge("put_back", (CREATED, POISON), ERROR, "operator"),  # other ways back are edges of other verbs
    Edge("delete", (CREATED, PROCESSING, ERROR, POISON, COMPLETED), None, "operator"),
    Edge("housekeep", TERMINAL, None, "operator"),
)
BY_VERB = {edge.verb: edge for edge in EDGES}


def sources(verb: str) -> tuple[Status, ...]:
    """Return the statuses ``verb`` may start from."""
    return BY_VERB[verb].sources


def sql_sources(verb: str) -> str:
    """Return ``sources(verb)`` as the inside of an SQL ``IN (…)``."""
    return ", ".join(f"'{status}'" for status in sources(verb))
