"""The data pipeline: the queue as a source and a sink of Spark, and the jobs on it. It knows no Django.

Read in this order: ``jobs`` (what a job is), ``source`` (the task table in Spark), ``lake`` (the archive's files),
``reports`` (statistics and forecasts), ``spark`` (the session).
"""
