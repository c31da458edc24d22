"""The queue itself. Each stage of a task's life is a file of that name; docs/design.md has them in order.

Stages meet through the values ``Lease`` and ``Outcome``; only ``rescue`` is made of other stages.
"""
