"""Others, each through its public interface with settings that suit a drain; one module each, run as a process.

``python -m tests.benchmarks.peers NAME install | single | fill N | drain N`` says READY, begins at GO, and says what it
measured. Each module has a function for each: ``install`` makes its tables, ``single`` returns what enqueues one task
in a transaction of its own, ``fill`` enqueues many in the way it offers for many, and ``drain`` processes until nothing
waits and returns how many tasks that were.
"""
