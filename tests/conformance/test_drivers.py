"""Queue drivers: what is refused, and with which words. What one must do is the rest of this folder."""

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_dbtaskqueue.core.exceptions import TaskQueueError
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow.checkout import strategy_for


@pytest.mark.django_db(databases=["default", "sqlite"])
def test_a_driver_without_its_methods_is_refused_by_name() -> None:
    for alias, strategy, error, words in (
        (
            "default",
            "tests.conformance.driver.Lame",
            ImproperlyConfigured,
            r"conformance\.driver\.Lame.*lacks take\(\)",
        ),
        ("default", "tests.nowhere.Driver", ImproperlyConfigured, "='tests.nowhere.Driver' cannot be made"),
        ("sqlite", "skip_locked", TaskQueueError, r'needs SELECT … FOR UPDATE SKIP LOCKED.*"auto"'),
    ):
        with pytest.raises(error, match=words):
            strategy_for(Session.on(alias), strategy)
