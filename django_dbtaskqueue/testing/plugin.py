"""The pytest plugin, beside pytest-django. Fixtures import Django when a test asks for them, never before.

``taskqueue``            the test kit (``TaskQueueKit``): ``drain``, ``assert_enqueued``, ``perform``, ``advance``, …
``taskqueue_registry``   processors that the test registers or takes away are as before after it
"""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from django_dbtaskqueue.testing import TaskQueueKit


@pytest.fixture
def taskqueue_registry() -> Iterator[None]:
    """Put the processors back to what they were before the test."""
    from django_dbtaskqueue import registry

    saved = registry.snapshot()
    yield
    registry.restore(saved)


@pytest.fixture
def taskqueue(taskqueue_registry: None) -> "TaskQueueKit":
    """The test kit. Works with ``django_db``, in its transaction; ``run_poller`` needs ``transaction=True``."""
    from django_dbtaskqueue.testing import TaskQueueKit

    return TaskQueueKit()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Flush before the last fixtures go."""
    if nextitem is None:
        pytest_sessionfinish()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """End the sender of wake-ups, whose connection would keep the test database alive."""
    if (notifier := sys.modules.get("django_dbtaskqueue.db.notify")) is not None:
        notifier.flush()
