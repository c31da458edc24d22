"""The poller: it fetches tasks, runs their processors, and settles the outcomes.

``loop`` polls. ``fetch`` chooses queues and checks out, as many tasks as ``free_slots`` says; ``queue_state`` is one
polled queue. ``executors`` run processors, ``held_leases`` writes outcomes and renews leases. ``heartbeat``
reports, obeys operators, rescues and runs other periodic jobs; ``supervisor`` keeps child processes alive.
"""
