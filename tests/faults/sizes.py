"""How much of each fault a run has to reach, and the limits that its queues have."""

from dataclasses import dataclass

LEASE_S = 3.0
CLOCK_S = 240.0  # by which the processes' clocks are wrong, in both directions; the bridge allows 300
CAPACITY = 200  # of the queue "small"
LETHAL_ATTEMPTS = 3  # of a task of the queue "lethal"
STEPS = "reserve", "charge", "letter"  # of a task of the queue "steps"
MAX_RUNNING = {"limited": 3, "wide": 2}  # at a time: of the queue, of each group of the queue
RATES = {"limited": (40, 8), "wide": (10, 4)}  # a second, and at once: of the queue, of each group of the queue


@dataclass(frozen=True)
class Size:
    tasks: int
    kills: int
    pauses: int
    restarts: int
    terminations: int
    stalls: int
    seconds: float  # of faults, about
    promotions: int = 0  # of a standby; there is one at most


CI = Size(tasks=30_000, kills=100, pauses=12, restarts=3, terminations=200, stalls=4, seconds=270, promotions=1)
SOAK = Size(tasks=150_000, kills=400, pauses=60, restarts=12, terminations=1500, stalls=20, seconds=1800, promotions=1)
# Of a run before each change lands: each fault at least once.
SHORT = Size(tasks=600, kills=4, pauses=1, restarts=1, terminations=10, stalls=2, seconds=20, promotions=1)
# Of a run with a mutation: stalls show most of them, for they let former holders write.
MUTATED = Size(tasks=3_000, kills=8, pauses=3, restarts=1, terminations=20, stalls=8, seconds=45)
