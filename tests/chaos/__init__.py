"""Real poller processes on real databases that are killed, stopped, cut off and starved.

A child runs with ``tests.chaos.settings``: those of all tests, this package as one more application (its processors
are in ``tasks.py``), and the queue's settings from the environment, so that both sides of a test have the same.
"""
