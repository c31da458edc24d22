"""``python -m tests.benchmarks``: how fast ours is, beside a bare loop on psycopg and beside what others offer."""
