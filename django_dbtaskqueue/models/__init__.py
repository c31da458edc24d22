"""The tables. ``tasks``: TASKS, its history and failed attempts; ``control``: queues, schedules, pollers and what is
counted, what operators do, and what the data pipeline keeps."""

from django_dbtaskqueue.models import control, tasks
from django_dbtaskqueue.models.control import *  # noqa: F403 -- each of the two names its tables in ``__all__``
from django_dbtaskqueue.models.tasks import *  # noqa: F403 -- as above

__all__: list[str] = []
__all__ += control.__all__
__all__ += tasks.__all__
