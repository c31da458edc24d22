"""The check of words knows a metaphor from an ordinary word. How many names may still be old: ``LIMITS``."""

from __future__ import annotations

from tests.architecture.words import is_old

OLD: list[tuple[str, str | None, str]] = [
    ("module", "poller.lane", "lane"),
    ("class", "poller.rooms", "Rooms"),
    ("class", "flow.door", "SettleDoor"),
    ("class", None, "HandDoor"),
    ("function", "flow.checkout", "take_or_walk"),
    ("variable", "poller.loop", "carrier_count"),
    ("constant", "flow.checkout", "WALK_SHARE"),
    ("constant", "flow.move", "BACK_IN_LINE"),
    ("parameter", "flow.checkout", "line"),
    ("parameter", None, "lanes"),
    ("module", "operations.findings", "findings"),
    ("function", "flow.groups", "_enter_line"),
]


def test_old_words_are_found() -> None:
    for kind, module, text in OLD:
        assert is_old(kind, module, text)


ORDINARY: list[tuple[str, str | None, str]] = [
    ("variable", "flow.failures", "line"),  # of text
    ("constant", "flow.checkout", "FULL_SCAN_TIME_SHARE"),
    ("module", "pipeline.findings", "findings"),
    ("module", "models.control", "control"),
    ("class", "poller.heartbeat", "Heartbeat"),
    ("variable", "poller.loop", "plane"),
    ("variable", None, "gate"),
    ("module", "flow.selection", "selection"),
]


def test_ordinary_words_are_not() -> None:
    for kind, module, text in ORDINARY:
        assert not is_old(kind, module, text)
