"""Every statement stands in a file as the database gets it: a change of one shows in the diff of that file."""

from difflib import unified_diff

import pytest

from django_dbtaskqueue.core.sql.dialects import DIALECTS
from tests.core.statements import file_of, text_of
from tests.core.statements.layout import laid_out


@pytest.mark.parametrize("vendor", DIALECTS)
def test_statements_are_those_in_the_file(vendor: str) -> None:
    stored, made = file_of(vendor).read_text(), text_of(vendor)
    changes = "\n".join(unified_diff(stored.splitlines(), made.splitlines(), "stored", "made now", lineterm=""))
    assert not changes, f"Run `python -m tests.core.statements --write` and read the diff.\n{changes}"


def test_the_layout_changes_nothing_but_space() -> None:
    sql = "SELECT a, (SELECT max(b) FROM x WHERE c BETWEEN 1 AND 2 AND d = 'FROM it') FROM t WHERE e ORDER BY a"
    assert laid_out(sql).split("\n")[-3:] == ["FROM t", "WHERE e", "ORDER BY a"]
    assert "".join(laid_out(sql).split()) == "".join(sql.split())
