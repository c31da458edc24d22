"""The poller: the loop that checks tasks out, has them processed, and settles them.

``loop`` polls; ``lane`` is one queue as the loop sees it; ``executors`` run processors; ``renew`` keeps leases alive;
``wakeup`` listens; ``control`` reports and obeys; ``supervisor`` keeps child processes running.
"""
