"""The check of words knows a metaphor from an ordinary word. How many names may still be old: ``LIMITS``."""

from tests.architecture.words import is_old

# Of each name its kind, its module inside the package ("-": outside of it), and itself.
OLD = """
    module poller.lane lane, class poller.rooms Rooms, class flow.door SettleDoor, class - HandDoor,
    function flow.checkout take_or_walk, variable poller.loop carrier_count, constant flow.checkout WALK_SHARE,
    constant flow.move BACK_IN_LINE, parameter flow.checkout line, parameter - lanes,
    module operations.findings findings, function flow.groups _enter_line
"""
# "line" is one of text, and "gate" is one of an airport.
ORDINARY = """
    variable flow.failures line, constant flow.checkout FULL_SCAN_TIME_SHARE, module pipeline.findings findings,
    module models.control control, class poller.heartbeat Heartbeat, variable poller.loop plane, variable - gate,
    module flow.selection selection
"""


def test_old_words_are_found_and_ordinary_ones_are_not() -> None:
    for names, old in [(OLD, True), (ORDINARY, False)]:
        for name in names.split(","):
            kind, module, text = name.split()
            assert is_old(kind, None if module == "-" else module, text) == old, name
