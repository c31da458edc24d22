"""Each feature on each road that runs tasks: what holds is data, tested, and printed in docs/reference/semantics.md."""
