"""Others, each through its public interface with settings that suit a drain; one module each, run as a process.

``python -m tests.benchmarks.peers NAME install | single | fill N | drain N`` says READY, begins at GO, and says what it
measured. What is not installed says so instead.
"""
