"""Fixtures of the operations' tests."""

from __future__ import annotations

import pytest
from django.test import Client


@pytest.fixture(params=["default", "sqlite"], ids=["postgresql", "sqlite"])
def alias(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def op(admin_client: Client) -> Client:
    """The browser of an operator who may do all."""
    return admin_client
