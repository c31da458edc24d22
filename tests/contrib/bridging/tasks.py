"""The processor that sends."""

from django_dbtaskqueue import processor
from django_dbtaskqueue.contrib.bridge import send_to

processor("outbox")(send_to("there"))
