"""What a task is: states, outcomes, leases, retries, JSON, texts. Standard library only: Spark executors import it."""
