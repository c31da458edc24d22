"""Many made-up tasks at once, to see how pages and pollers fare at size."""

from __future__ import annotations

COLUMNS = (
    "queue_name", "reference_number", "status", "final_status", "attempt", "total_attempt", "priority", "payload",
    "process_result", "fingerprint", "poller_instance", "create_time", "ready_time", "next_process_time",
    "last_update_time", "start_time", "finish_time",
)  # fmt: skip
COPY = "COPY {table} (" + ", ".join(COLUMNS) + ") FROM STDIN"
