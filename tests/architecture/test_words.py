"""The check of words knows a metaphor from an ordinary word. How many names may still be old: ``LIMITS``."""

from tests.architecture.words import is_old


def test_old_words_are_found_and_ordinary_ones_are_not() -> None:
    old = "lane HandDoor take_or_walk carrier_count WALK_SHARE BACK_IN_LINE _enter_line gate"
    ordinary = "line FULL_SCAN_TIME_SHARE findings control Heartbeat plane selection"  # "line" is one of text
    assert [name for name in old.split() if not is_old(name)] == []
    assert [name for name in ordinary.split() if is_old(name)] == []
    assert (is_old("gate", inside=False), is_old("lanes", inside=False)) == (False, True)  # that of an airport
