"""Reading and writing the task table with Spark."""
