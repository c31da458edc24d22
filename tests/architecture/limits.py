"""How large each figure of the package may be.

A limit may only fall, but for new functions: then the commit that raises it says which.
"""

LIMITS: dict[str, int] = {
    # With COPY, settings from the command line, the index of groups, days that reports keep, cursors that are kept,
    # wake-ups that callers send, small lakes, a cancel while a call starts
    "lines": 49_555,
    # One for arrivals, two for events of finished tasks, three for days that reports keep, one for kept cursors
    "files": 201,
    "tables": 24,
    "entries at the top": 21,  # one more: the backend of Django's tasks
    "lines of the longest file": 600,
    "file names twice": 0,
    "constant names twice": 0,
    "old names": 0,
    "longest import chain": 15,  # parents and children of tasks: two more; the settings of the bridge: one
    "Any": 678,
    "files that branch on outcomes": 3,
    "enqueue: calls": 35,
    "enqueue: modules": 8,
    "plain enqueue: calls": 25,
    "plain enqueue: modules": 8,
    "task: calls": 129,  # 128, or one more: which of two threads is first
    "task: modules": 18,
    "median function lines": 8,
    "90 % of functions, lines": 20,
    "function lines": 40,
    "positional arguments": 6,
}
LONG_FILE_LINES = 300
