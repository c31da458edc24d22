"""The releases, made once, and a database for each test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from django.conf import settings

from tests.conftest import _created
from tests.stranger.conftest import wheel as wheel
from tests.upgrade.releases import PREVIOUS, Release, install, wheel_of

Next = Callable[[str], Release]


@pytest.fixture(scope="session")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Release:
    folder = tmp_path_factory.mktemp("previous")
    return install("previous", wheel_of(PREVIOUS, folder), folder / "venv")


@pytest.fixture(scope="session")
def today(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Release:
    return install("today", wheel, tmp_path_factory.mktemp("today") / "venv")


@pytest.fixture
def next_release(wheel: Path, tmp_path: Path) -> Next:
    """Make a release after today's: with one more migration, and a model that needs it."""

    def make(migration: str) -> Release:
        release = install("next", wheel, tmp_path / "venv", plants="planted")
        release.plant(migration)
        return release

    return make


@pytest.fixture
def database() -> Iterator[str]:
    with _created(settings.SERVER_URL) as made:
        yield made.url
