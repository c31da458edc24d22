"""Every statement stands in a file as the database gets it: a change of one shows in the diff of that file."""

from difflib import unified_diff

import pytest

from django_dbtaskqueue.core.sql.dialects import DIALECTS
from tests.core.statements import file_of, statements_of, text_of
from tests.core.statements.layout import laid_out


@pytest.mark.parametrize("vendor", DIALECTS)
def test_statements_are_those_in_the_file(vendor: str) -> None:
    stored, made = file_of(vendor).read_text(), text_of(vendor)
    for sql in statements_of(vendor).values():
        assert "".join(laid_out(sql).split()) == "".join(sql.split()), "the layout changes nothing but space"
    changes = "\n".join(unified_diff(stored.splitlines(), made.splitlines(), "stored", "made now", lineterm=""))
    assert not changes, f"Run `python -m tests.core.statements --write` and read the diff.\n{changes}"
