"""The life of a task, in order.

1. ``enqueue``    a row in the caller's own transaction (``enqueue_many``: many rows)
2. ``checkout``   due rows under a lease; the attempt is charged in the same statement
3. ``run``        decode, call the processor, decide: a lease becomes an outcome
4. ``settle``     the only way out of PROCESSING, fenced by ``total_attempt``
5. ``observe``    tell listeners and logs what is already stored
6. ``move``       what operators do
7. ``rescue``     ERROR for a task whose process died during its last attempt
8. ``retention``  finished tasks leave the table

Stages meet through the values ``Lease`` and ``Outcome``; only ``rescue`` is made of other stages.
"""
