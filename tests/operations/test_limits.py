"""A question of a face has a time limit, on each kind of database, and leaves the connection as it was."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError, connections

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.exceptions import SearchTooSlow
from django_dbtaskqueue.operations.bounded_reads import statement_timeout
from django_dbtaskqueue.operations.permissions import can_operate
from django_dbtaskqueue.operations.verbs import REPROCESS

FOR_EVER = {
    "default": "SELECT pg_sleep(600)",
    "sqlite": "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n",
}


def ask(alias: str, sql: str) -> Any:
    with connections[alias].cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchone()[0]


@pytest.mark.django_db(databases=["default", "sqlite"])
@pytest.mark.parametrize("alias", ["default", "sqlite"])
def test_what_takes_too_long_is_given_up_and_the_connection_goes_on(alias: str) -> None:
    words = r"within 50ms.*Narrow the search: name a queue"
    with pytest.raises(SearchTooSlow, match=words), statement_timeout(alias, timedelta(milliseconds=50)):
        ask(alias, FOR_EVER[alias])
    assert ask(alias, "SELECT 1") == 1
    with statement_timeout(alias):
        assert ask(alias, "SELECT 2") == 2


@pytest.mark.django_db
def test_the_limit_ends_with_the_block() -> None:
    before = ask("default", "SHOW statement_timeout")
    with statement_timeout("default", timedelta(seconds=7)):
        assert ask("default", "SHOW statement_timeout") == "7s"
    assert ask("default", "SHOW statement_timeout") == before


@pytest.mark.django_db
def test_another_error_stays_what_it_is() -> None:
    with pytest.raises(OperationalError, match="somebody else"), statement_timeout("default"):
        raise OperationalError("somebody else")


def test_the_limit_is_a_setting(settings: Any) -> None:
    assert conf.settings().operations_timeout == timedelta(seconds=3)
    settings.DBTASKQUEUE = {"OPERATIONS_TIMEOUT": "250ms"}
    assert conf.settings().operations_timeout == timedelta(milliseconds=250)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"OPERATIONS_TIMEOUT": "0s"}, "a positive duration"),
        ({"MASK": "password"}, "a list of parts of keys"),
        ({"API": "yes"}, "True or False"),
        ({"API_TOKENS": {"ada": 1}}, "a dict of user name to the hash"),
        ({"CAN_OPERATE": 1}, "the dotted path of"),
    ],
)
def test_a_wrong_setting_says_what_it_should_be(settings: Any, given: dict[str, Any], words: str) -> None:
    settings.DBTASKQUEUE = given
    with pytest.raises(ImproperlyConfigured, match=words):
        conf.settings()


NO_RULE = "not callable"


@pytest.mark.django_db
@pytest.mark.parametrize("path", ["nowhere.rule", f"{__name__}.NO_RULE"])
def test_a_rule_that_is_none_is_named(settings: Any, admin_user: Any, path: str) -> None:
    settings.DBTASKQUEUE = {"CAN_OPERATE": path}
    assert can_operate(admin_user, REPROCESS), "no queue, nothing to ask"
    with pytest.raises(ImproperlyConfigured, match="CAN_OPERATE"):
        can_operate(admin_user, REPROCESS, "claims")
