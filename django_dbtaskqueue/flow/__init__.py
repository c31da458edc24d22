"""The road of a task, in the order it is travelled.

1. ``enqueue``    a row in the caller's own transaction
2. ``checkout``   due rows under a lease; the attempt is charged in the same statement
3. ``process``    decode, call the processor, decide: a lease becomes an outcome
4. ``settle``     the one door out of PROCESSING, fenced by ``total_attempt``
5. ``observe``    tell listeners and logs what is already stored
6. ``move``       what operators do, and the rescue of tasks whose process died
7. ``housekeep``  finished tasks age out

Stages do not import each other: they meet through the values ``Lease`` and ``Outcome``.
"""
