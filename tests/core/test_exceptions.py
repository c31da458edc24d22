"""Errors travel: from a child process to its poller, and into a copy."""

import pickle
from copy import copy

from django_dbtaskqueue.core import exceptions
from django_dbtaskqueue.core.exceptions import TaskQueueError

GIVEN: dict[str, tuple[object, ...]] = {
    "CheckFailed": ("2 rows", {"tasks": 1}), "DuplicateTask": ("a", "parcels"), "JobOptionError": ("--lake", "is bad"),
    "LakeError": ("path", "is bad", "Mend it"), "LeaseLost": (1, 2, "complete"), "MiddlewareError": ("a.b", "no"),
    "PayloadError": ("too long",), "ProcessDied": ("poller", 1, 5), "QueueFull": ("parcels", 5),
    "SearchError": ("a", "is bad"), "SearchTooSlow": ("5s",), "SignalRefused": (1, "go", None),
    "SignalTimeout": (1, "go"), "StepChanged": (1, 2, "a", "b"), "TaskCancelled": (1,),
    "TaskFailed": (1, "parcels", "ERROR", "no"), "TaskGone": (1, "parcels"),
    "TooManyGroups": ("parcels", 5), "UnknownQueue": ("a", ["b"]),
}  # fmt: skip


def test_an_error_is_the_same_in_another_process() -> None:
    kinds = [getattr(exceptions, name) for name in exceptions.__all__ if name != "ReenqueueDelayMissing"]
    for kind in [kind for kind in kinds if issubclass(kind, TaskQueueError)]:
        error = kind(*GIVEN.get(kind.__name__, ("no",)))
        for other in (pickle.loads(pickle.dumps(error)), copy(error)):  # noqa: S301 -- just pickled here
            assert type(other) is kind
            assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))


def test_an_unknown_queue_among_many_is_told_with_a_few_of_them() -> None:
    told = str(exceptions.UnknownQueue("queue-4O", [f"queue-{number}" for number in range(400)]))
    assert "Did you mean 'queue-4" in told and "and 380 more. Add" in told and len(told) < 500
