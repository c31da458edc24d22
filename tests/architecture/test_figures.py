"""Few pieces, short ways: no figure of the package is above its limit."""

from pathlib import Path

import pytest

from tests.architecture import figures
from tests.architecture.limits import LIMITS
from tests.architecture.source import Module
from tests.architecture.words import is_old


def module_of(folder: Path, code: str) -> Module:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "module.py"
    path.write_text(code)
    return Module(path)


def test_the_source_stays_within_its_limits() -> None:
    """``python -m tests.architecture`` says where."""
    assert {name: found for name, found in figures.of_source().items() if found > LIMITS[name]} == {}


def test_journeys_stay_within_their_limits() -> None:
    found = figures.of_journeys()
    assert found.keys() == {name for name in LIMITS if ": " in name}
    assert {name: value for name, value in found.items() if value > LIMITS[name]} == {}
    # A count of nothing would stay below every limit.
    assert any("enqueue" in name for name in figures.journeys()["enqueue"]["functions"])
    assert any(name.endswith(":perform_task") for name in figures.journeys()["task"]["functions"])


def test_the_search_finds_branches_on_outcomes(tmp_path: Path) -> None:
    for code, found in [
        ("isinstance(outcome, Complete | CompleteDelete)", 1),
        ("isinstance(outcome, (Fail, settle.Release))", 1),
        ("type(outcome) is outcomes.Poison", 1),
        ("kind in (Fail, Poison)", 1),
        ("match outcome:\n    case Fail(): pass\n    case Poison(reason=text): pass", 2),
        ("{Fail: 1, Poison: 2}", 1),
        ("outcome == Fail('text')", 0),
        ("isinstance(outcome, str)", 0),
    ]:
        assert len(figures.branches(module_of(tmp_path, code))) == found


def test_the_search_finds_names_that_files_and_constants_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = ("flow", "core/sql", "pull")
    codes = ("A_S = 1\nB_S = 1\nC_S = A_S", "A_S = 2\nB_S = 1", "a_s = 3")
    monkeypatch.setattr(figures, "REPOSITORY", tmp_path)
    package = tmp_path / figures.PACKAGE
    written = [module_of(package / folder, code) for folder, code in zip(folders, codes, strict=True)]
    monkeypatch.setattr(figures, "WRITTEN", written[:2])
    monkeypatch.setattr(Module, "name", property(lambda module: module.path.parent.name))
    assert figures.constant_names_twice() == ["A_S: flow, sql"]
    assert figures.file_names_twice() == []
    monkeypatch.setattr(figures, "WRITTEN", written)
    assert figures.file_names_twice() == ["module.py: flow, pull"]


def test_old_words_are_found_and_ordinary_ones_are_not() -> None:
    old = "lane HandDoor take_or_walk carrier_count WALK_SHARE BACK_IN_LINE _enter_line gate"
    ordinary = "line FULL_SCAN_TIME_SHARE findings control Heartbeat plane selection"  # "line" is one of text
    assert [name for name in old.split() if not is_old(name)] == []
    assert [name for name in ordinary.split() if is_old(name)] == []
    assert (is_old("gate", inside=False), is_old("lanes", inside=False)) == (False, True)  # that of an airport
