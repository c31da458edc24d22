"""Queue drivers: what is refused, and with which words. What one must do is the rest of this folder."""

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_dbtaskqueue.core.exceptions import TaskQueueError
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow.checkout import strategy_for


@pytest.mark.django_db
def test_a_driver_without_its_methods_is_refused_by_name() -> None:
    with pytest.raises(ImproperlyConfigured, match=r"tests\.conformance\.driver\.Lame.*lacks take\(\)"):
        strategy_for(Session.on("default"), "tests.conformance.driver.Lame")


@pytest.mark.django_db
def test_a_path_that_leads_nowhere_is_said() -> None:
    with pytest.raises(ImproperlyConfigured, match=r"strategy='tests\.nowhere\.Driver' cannot be made"):
        strategy_for(Session.on("default"), "tests.nowhere.Driver")


@pytest.mark.django_db(databases=["sqlite"])
def test_a_database_that_cannot_skip_locked_says_what_to_set_instead() -> None:
    with pytest.raises(TaskQueueError, match=r'needs SELECT … FOR UPDATE SKIP LOCKED.*"auto"'):
        strategy_for(Session.on("sqlite"), "skip_locked")
