"""The queues of the load: how often a task of each runs, and the status in which it stays. None: it is deleted."""

QUEUES = {
    **dict.fromkeys(("plain", "many", "history", "grouped", "atomic", "event-loop"), (1, "COMPLETED")),
    **dict.fromkeys(("retried", "again"), (2, "COMPLETED")),
    "lost": (2, "ERROR"),
    "set-aside": (1, "POISON"),
    "gone": (1, None),
}
