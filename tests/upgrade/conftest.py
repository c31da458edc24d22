"""The releases, made once, and a database for each test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from django.conf import settings

from tests.conftest import _created
from tests.stranger.environments import build_wheel
from tests.templates import url_of
from tests.upgrade.releases import PREVIOUS, Release, install, wheel_of

Next = Callable[[str], Release]


@pytest.fixture(scope="session")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Release:
    folder = tmp_path_factory.mktemp("previous")
    return install("previous", wheel_of(PREVIOUS, folder), folder / "venv")


@pytest.fixture(scope="session")
def today_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("today"))


@pytest.fixture(scope="session")
def today(today_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Release:
    return install("today", today_wheel, tmp_path_factory.mktemp("today") / "venv")


@pytest.fixture
def next_release(today_wheel: Path, tmp_path: Path) -> Next:
    """Make a release after today's: with one more migration, and a model that needs it."""

    def make(migration: str) -> Release:
        release = install("next", today_wheel, tmp_path / "venv", plants="planted")
        release.plant(migration)
        return release

    return make


@pytest.fixture
def database() -> Iterator[str]:
    with _created(settings.SERVER_URL) as name:
        yield url_of(settings.SERVER_URL, name)
