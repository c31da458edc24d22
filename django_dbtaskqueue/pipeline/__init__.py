"""The data pipeline: the queue as a source and a sink of Spark, and the jobs on it. It knows no Django.

Read in this order: ``jobs`` (what a job is), ``source`` (the queue in Spark), ``transforms`` (pure functions from
DataFrame to DataFrame), then the jobs.
"""
