from __future__ import annotations

import re
from collections import Counter

from tests.mutations.seeded import REPOSITORY, Bug, bugs

FOLDERS = ("flow", "poller", "core", "operations", "pull", "backend")


def fault_of(bug: Bug) -> str:
    try:
        compile(bug.apply(), bug.place, "exec")
    except (OSError, SyntaxError, ValueError) as error:
        return f"{bug.place}: {bug.name}: {error}"
    for word in bug.command.split(" -k ")[0].split():
        file, _, test = word.partition("::")
        path = REPOSITORY / file
        if not path.exists() or (test and not re.search(rf"def {test}\b", path.read_text())):
            return f"{bug.place}: {bug.name}: there is no {word}"
    return "" if bug.piece != bug.replacement else f"{bug.place}: {bug.name}: nothing changes"


def test_each_bug_can_be_seeded_and_each_command_names_what_is_there() -> None:
    table = list(bugs())
    folders = Counter(bug.place.partition("/")[0] for bug in table)
    assert not list(filter(None, map(fault_of, table)))
    assert not [name for name, number in Counter(bug.name for bug in table).items() if number > 1]
    assert len(table) >= 60 and min(folders[name] for name in FOLDERS) >= 8, folders
