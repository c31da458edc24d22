"""The queues of the load: how often a task of each runs, and the status in which it stays. None: it is deleted."""

QUEUES = {
    "plain": (1, "COMPLETED"),
    "many": (1, "COMPLETED"),
    "history": (1, "COMPLETED"),
    "grouped": (1, "COMPLETED"),
    "atomic": (1, "COMPLETED"),
    "event-loop": (1, "COMPLETED"),
    "retried": (2, "COMPLETED"),
    "again": (2, "COMPLETED"),
    "lost": (2, "ERROR"),
    "set-aside": (1, "POISON"),
    "gone": (1, None),
}
