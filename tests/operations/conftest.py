"""Each test of operators has a database, two queues, the admin and the API; other settings win over these."""

from datetime import timedelta
from typing import Any

import pytest
from django.test import Client

from django_dbtaskqueue.admin import list_pages
from django_dbtaskqueue.operations.search import query
from tests.factories import QUEUE
from tests.flow.conftest import alias as alias


def pytest_itemcollected(item: pytest.Function) -> None:
    own = [name for name in item.fixturenames if name.endswith("process_database")]
    if not own and not item.get_closest_marker("django_db"):
        databases = ["default", "sqlite"] if "alias" in item.fixturenames else ["default"]
        item.add_marker(pytest.mark.django_db(databases=databases))


@pytest.fixture(autouse=True)
def _site(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.ROOT_URLCONF = "tests.operations.site"
    # A busy machine may take its time: what is counted or found late would be shown otherwise.
    limits = {"HEARTBEAT": "1m", "OPERATIONS_TIMEOUT": "1m"}
    settings.DBTASKQUEUE = {"QUEUES": {QUEUE: {}, "letters": {}}, "API": True, **limits}
    monkeypatch.setattr(list_pages, "COUNT_TIMEOUT", timedelta(minutes=1))
    monkeypatch.setattr(query, "WHOLE_SEARCH_TIMEOUT", timedelta(minutes=1))


@pytest.fixture
def op(admin_client: Client) -> Client:
    return admin_client
