"""What is uploaded: the sdist has what the tests need, the wheel built from it has the package and nothing else."""

import email
import importlib.util
import os
import re
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path, PurePosixPath

import pytest

from tests.docs.pages import PROJECT
from tests.stranger.environments import REPOSITORY, execute

PACKAGE = "django_dbtaskqueue"
TOP_LEVEL = {
    *(PACKAGE, "example_project", "tests", "docs", "manage.py", "pyproject.toml", "README.md", "LICENSE"),
    *("CHANGELOG.md", "PKG-INFO", ".ci", ".github", ".editorconfig", ".gitignore", ".pre-commit-config.yaml"),
}
INDEX = "https://img.shields.io/pypi/v"
# What a file of the package may be.
SUFFIXES = {".py", ".html", ".css", ".js", ".po", ".mo", ".typed"}
NAMES = {"LICENSE", "SHA256SUMS"}  # of vendored files
RELATIVE_LINK = re.compile(r"\]\((?!https?://)[^)]+\)|^\[[^\]]+\]: (?!https?://)", re.MULTILINE)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = [name for name in ("build", "hatchling", "twine") if importlib.util.find_spec(name) is None]
    if missing and "CI" not in os.environ:
        pytest.skip(f'the extra "test" is not installed: {", ".join(missing)}')
    folder = tmp_path_factory.mktemp("dist")
    execute([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(REPOSITORY)])
    return folder


@pytest.fixture(scope="module")
def source(dist: Path) -> Path:
    (archive,) = dist.glob("*.tar.gz")
    folder = dist / "unpacked"
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    (found,) = folder.iterdir()
    return found


@pytest.fixture(scope="module")
def wheel(dist: Path) -> zipfile.ZipFile:
    (found,) = dist.glob("*.whl")
    return zipfile.ZipFile(found)


def files_of(folder: Path) -> set[str]:
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in found if "__pycache__" not in path.parts}


def test_the_index_accepts_both(dist: Path) -> None:
    packages = sorted(str(path) for path in dist.iterdir() if path.is_file())
    assert len(packages) == 2
    execute([sys.executable, "-m", "twine", "check", "--strict", *packages])


def test_the_page_of_the_index_has_working_links(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata: Message = email.message_from_bytes(wheel.read(name))
    assert metadata["Version"] == PROJECT["version"]
    urls = dict(value.split(", ", 1) for value in metadata.get_all("Project-URL", []))
    assert urls == PROJECT["urls"] and {"Documentation", "Source", "Issues", "Changelog"} <= set(urls)
    text = metadata.get_payload()
    assert PROJECT["urls"]["Source"] in text and RELATIVE_LINK.findall(text) == []
    assert [name for name in PROJECT["optional-dependencies"] if f"`{name}`" not in text] == [], "an extra says nothing"
    badges = re.findall(r"^\[!\[\w+\]\((.+?)\)\]", text, re.MULTILINE)
    assert badges == [f"{PROJECT['urls']['Source']}/actions/workflows/ci.yml/badge.svg", f"{INDEX}/{PROJECT['name']}"]


def test_the_wheel_has_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == {f"{PACKAGE}/{name}" for name in files_of(REPOSITORY / PACKAGE)}
    assert [name for name in map(PurePosixPath, names) if name.suffix not in SUFFIXES and name.name not in NAMES] == []
    assert not [name for name in names if re.search(r"(^|/)(tests?|conftest\.py)(/|$)", name)]


def test_the_sdist_has_what_a_checkout_has(source: Path) -> None:
    assert {path.name for path in source.iterdir()} == TOP_LEVEL
    for name in ("tests", "docs", "example_project", ".ci", ".github"):
        assert files_of(source / name) == files_of(REPOSITORY / name), name


@pytest.mark.slow
def test_the_tests_run_from_the_sdist(source: Path) -> None:
    """All are collected there, so all that they import is there; a few run, with a database."""
    env = {**os.environ, "PYTHONPATH": str(source), "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "", "-p", "no:cacheprovider", "--assert=plain"]
    collected = execute([*command, "--collect-only"], env=env, cwd=source)
    found = set(re.findall(r"^(tests/\S+?\.py)::", collected, re.MULTILINE))
    assert found == {path.relative_to(source).as_posix() for path in (source / "tests").rglob("test_*.py")}
    assert " passed" in execute([*command, "tests/test_conf.py", "tests/flow/test_querysets.py"], env=env, cwd=source)
