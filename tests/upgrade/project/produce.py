"""A producer: files an order and its tasks in one transaction, again and again, until the file ``stop`` exists."""

import threading
from pathlib import Path

import django

django.setup()

from django.db import connection, transaction  # noqa: E402 -- Django must be set up first
from load.queues import QUEUES  # noqa: E402 -- Django must be set up first
from load.tasks import RELEASE  # noqa: E402 -- Django must be set up first

from django_dbtaskqueue import enqueue, enqueue_many  # noqa: E402 -- Django must be set up first

number = 0
while not Path("stop").exists():
    number += 1
    reference = f"{RELEASE}-{number}"
    batch = [f"{reference}-{item}" for item in range(10)]
    with transaction.atomic():
        for queue in QUEUES:
            if queue != "many":
                group = f"{RELEASE}-{number % 3}" if queue == "grouped" else None
                enqueue(queue, reference, {"order": number}, group=group)
        enqueue_many("many", [(name, {"order": number}) for name in batch])
        with connection.cursor() as cursor:
            named = [(queue, reference) for queue in QUEUES if queue != "many"] + [("many", name) for name in batch]
            cursor.executemany("INSERT INTO ordered (queue, reference) VALUES (%s, %s)", named)
    threading.Event().wait(0.05)
print(f"{number} orders")
