import re
from collections import Counter

from tests.mutations.seeded import REPOSITORY, Bug, bugs

FOLDERS = ("backend", "core", "flow", "operations", "poller", "pull")


def fault_of(bug: Bug) -> str:
    try:
        bug.code()
    except (OSError, SyntaxError, ValueError) as error:
        return f"{bug.title}: {error}"
    for word in bug.command.partition(" -k ")[0].split():
        file, _, test = word.partition("::")
        path = REPOSITORY / file
        if not path.exists() or (test and not re.search(rf"def {test}\b", path.read_text())):
            return f"{bug.title}: there is no {word}"
    return f"{bug.title}: nothing changes" if bug.piece == bug.replacement else ""


def test_each_bug_can_be_seeded_and_its_command_names_files_that_are_there() -> None:
    table = list(bugs())
    assert not list(filter(None, map(fault_of, table)))
    assert len({bug.name for bug in table}) == len(table) >= 60
    numbers = Counter(bug.place.partition("/")[0] for bug in table)
    assert min(numbers[folder] for folder in FOLDERS) >= 8, numbers
