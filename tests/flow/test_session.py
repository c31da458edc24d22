"""A poller's own connections."""

from __future__ import annotations

import pytest
from django.db import connections

from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import Session


@pytest.mark.django_db(transaction=True)
def test_an_owned_connection_is_none_of_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept for the poller's life and set up in its own way, so no request may ever get it out of a pool."""
    notify.flush()  # one of an earlier test would close its connection under these options
    options = {**connections.settings["default"]["OPTIONS"], "pool": True}
    monkeypatch.setitem(connections.settings["default"], "OPTIONS", options)
    session = Session.open("default")
    assert session.run("SELECT current_setting('lock_timeout')", {}) == [("250ms",)]
    assert session.connection.pool is None  # type: ignore[attr-defined]
    session.close()
    assert connections.settings["default"]["OPTIONS"]["pool"] is True
