"""The wheel of this checkout and one environment for each Python, made once; a project of a stranger on top."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stranger.environments import Python, build_wheel, make_environment, pythons

Environment = Callable[[Python, str], dict[str, str]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "python" in metafunc.fixturenames and "not stranger" not in metafunc.config.option.markexpr:
        metafunc.parametrize("python", pythons().values(), ids=pythons(), scope="session")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    made: dict[tuple[str, str], dict[str, str]] = {}

    def get(python: Python, name: str) -> dict[str, str]:
        key = (python.version, name)
        if key not in made:
            made[key] = make_environment(python, wheel, tmp_path_factory.mktemp(f"{name}-{python.version}") / "venv")
        return dict(made[key])

    return get
