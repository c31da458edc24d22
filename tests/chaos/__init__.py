"""Real poller processes on real databases that are killed, stopped, cut off and starved.

A child runs with ``tests.chaos.settings``: those of all tests, this package as one more application (its processors
are in ``tasks.py``), and the queue's settings from the environment, so that both sides of a test have the same.
"""

ALONE = tuple(f"alone{number}" for number in range(8))  # as chaos, for pollers that each have one queue
ATOMIC = ("ledger", "moved", "dropped")
QUEUES = ("chaos", *ATOMIC, *ALONE)
