"""The settings file: laid over the dict, all faults told together, followed while the process runs."""

import itertools
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_dbtaskqueue import Fixed, enqueue
from django_dbtaskqueue.conf import queue as rules, settings as conf
from django_dbtaskqueue.conf.overrides import overridden_settings
from django_dbtaskqueue.models import Queue
from django_dbtaskqueue.operations import checks
from tests.clock import SteppedClock
from tests.conftest import ProcessDatabase
from tests.operations.site import refused
from tests.poller.processes import polling
from tests.support import PATIENCE, until

Edit = Callable[[str], None]
GOOD = """
[queues.mail]
lease = "15m"
max_attempts = 3
retry = "fixed:30s"

[queues.letters]
capacity = 10
"""
BAD = """
title = "no table of ours"

[queues.mail]
lease = "soon"
max_atempts = 3
keep = "forever"
retry = "sometimes"

[queues."no spaces"]
ttl = "1h"

[queues.letters]
capacity = 0
database = 7
"""


@pytest.fixture
def file(tmp_path: Path, settings: Any) -> Path:
    path = tmp_path / "queues.toml"
    path.write_text(GOOD)
    settings.DBTASKQUEUE = {"FILE": path, "QUEUES": {"mail": {"lease": "1m", "timeout": "30s"}, "plain": {}}}
    return path


@pytest.fixture
def edit(file: Path, clock: SteppedClock) -> Edit:
    """Write the file anew, in one step as editors and deployments do, and let time pass until it is looked at."""
    moments = itertools.count(10**9)

    def write(text: str) -> None:
        new = file.with_suffix(".new")
        new.write_text(text)
        os.utime(new, (next(moments),) * 2)  # one that was written a moment ago may be half written
        os.replace(new, file)
        clock.advance(rules.CHECK_INTERVAL_S)

    return write


def lease_minutes() -> float:
    return conf.default_settings("mail").lease / timedelta(minutes=1)


def test_the_file_goes_over_the_dict_setting_by_setting(edit: Edit) -> None:
    mail = conf.default_settings("mail")
    assert (mail.lease, mail.timeout, mail.max_attempts) == (timedelta(minutes=15), timedelta(seconds=30), 3)
    assert mail.retry == Fixed(timedelta(seconds=30)) and conf.default_settings("letters").capacity == 10
    assert conf.default_settings("plain") == conf.default_settings("never heard of")
    assert conf.is_known("plain") and not conf.is_known("leters")
    edit('[queues.mail]\ntimeout = "none"')
    assert conf.default_settings("mail").timeout is None


def test_all_faults_are_told_together_with_place_value_and_fix(file: Path) -> None:
    file.write_text(BAD)
    with pytest.raises(ImproperlyConfigured) as refused:
        conf.settings()
    text = str(refused.value)
    assert f"{file} has 8 faults:" in text
    for fault in (
        "'title' is not known here",
        "[queues.mail] lease = 'soon': ",
        "[queues.mail] max_atempts = 3: has no setting 'max_atempts'. Did you mean 'max_attempts'?",
        '[queues.mail] keep = \'forever\': keep=\'forever\' is not valid: "keep", "history" or "delete"',
        "[queues.mail] retry = 'sometimes': 'sometimes' is not a retry policy. ",
        "[queues.no spaces] cannot be a queue's name: use 1 to 200 letters",
        "[queues.letters] capacity = 0: capacity=0 is not valid: None or a whole number from 1 to 1,000,000,000",
        "[queues.letters] database = 7: database=7 is not valid: an alias of DATABASES",
    ):
        assert fault in text


def test_what_is_no_such_file_is_an_error_and_the_system_check_says_so(file: Path) -> None:
    for text, message in (
        ("[queues.mail\n[", r"is not valid TOML: .*line 1"),
        ("queues = 5", r"queues = 5 must be tables"),
        ("[queues]\nmail = 5", r"queues.mail = 5 must be a table"),
        ("[queue.mail]\nttl = '1h'", r"'queue' is not known here. Did you mean 'queues'\?"),
    ):
        file.write_text(text)
        refused(message, conf.settings, error=ImproperlyConfigured)
    file.unlink()
    refused(r"queues.toml cannot be read", conf.settings, error=ImproperlyConfigured)
    assert [error.id for error in checks.check_settings()] == ["dbtaskqueue.E001"]
    file.write_text(GOOD)
    assert lease_minutes() == 15


def test_the_path_may_start_at_base_dir_and_must_be_one(file: Path, settings: Any) -> None:
    settings.BASE_DIR = file.parent
    settings.DBTASKQUEUE = {"FILE": "queues.toml"}
    assert lease_minutes() == 15
    settings.DBTASKQUEUE = {"FILE": 5}
    refused(r"'FILE'\]=5 is not valid: the path of a TOML file", conf.settings, error=ImproperlyConfigured)


def test_a_bad_or_lost_file_changes_nothing_a_good_one_counts(file: Path, edit: Edit, clock: Any, caplog: Any) -> None:
    assert lease_minutes() == 15
    edit('[queues.mail]\nlease = "20m"\n[queues.novel]\nttl = "1h"')
    assert lease_minutes() == 20 and conf.default_settings("novel").ttl == timedelta(hours=1)
    assert not conf.is_known("letters") and conf.default_settings("mail").max_attempts == 5
    # A bad edit changes nothing, and that is logged once, with every fault, also of a newer file
    for _ in range(2):
        edit('[queues.mail]\nlease = "25m"\nkeep = "forever"\nttl = 5')
        assert lease_minutes() == 20 and conf.settings() is conf.settings()
    assert "has 2 faults" in caplog.text and caplog.text.count("The settings stay as they were") == 1
    edit('[queues.mail]\nlease = "25m"')
    assert lease_minutes() == 25
    file.unlink()
    clock.advance(rules.CHECK_INTERVAL_S)
    assert lease_minutes() == 25 and "cannot be read" in caplog.text
    edit('[queues.mail]\nlease = "2m"')
    assert lease_minutes() == 2


def test_tasks_do_not_move_with_an_edit(edit: Edit, caplog: pytest.LogCaptureFixture) -> None:
    assert lease_minutes() == 15
    edit('[queues.mail]\nlease = "2m"\ndatabase = "sqlite"\n[queues.new]\ndatabase = "sqlite"')
    assert lease_minutes() == 15 and "database = 'sqlite' cannot change while processes run" in caplog.text
    assert "[queues.new]" not in caplog.text  # nothing lives there yet
    edit('[queues.mail]\nlease = "2m"\n[queues.new]\ndatabase = "sqlite"')
    assert lease_minutes() == 2 and conf.default_settings("new").database == "sqlite"


def test_it_is_looked_at_each_second_and_read_when_it_changed(file: Path, clock: Any, monkeypatch: Any) -> None:
    clock.stop()
    assert lease_minutes() == 15
    looks = []
    stat = Path.stat

    def counted(path: Path, **options: Any) -> os.stat_result:
        looks.extend([path] * (path == file))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", counted)
    for number in range(3):
        for _ in range(100):
            conf.settings()
        assert len(looks) == number
        clock.advance(1)


def test_threads_see_one_or_the_other_and_never_a_mixture(edit: Edit) -> None:
    """Given settings whose two values always agree, then no thread ever sees them differ."""
    first, second = (f'[queues.mail]\nlease = "{n}m"\ntimeout = "{n}m"' for n in (1, 2))
    edit(first)
    assert conf._state is None
    conf.settings()

    def look() -> set[Any]:
        seen = set()
        while (timedelta(minutes=2), timedelta(minutes=2)) not in seen:
            found = conf.default_settings("mail")
            seen.add((found.lease, found.timeout))
        return seen

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(look) for _ in range(4)]
        edit(second)
        assert all(early == late for future in futures for early, late in future.result(PATIENCE))


def test_producers_follow_and_the_row_goes_over_the_file(sqlite_process_database: ProcessDatabase, edit: Edit) -> None:
    assert enqueue("mail").max_attempts == 3
    edit('[queues.mail]\nmax_attempts = 8\nlease = "15m"')
    assert enqueue("mail").max_attempts == 8
    Queue.objects.create(name="mail", overrides={"max_attempts": 9})
    applied = overridden_settings("mail", "default")
    assert (applied.max_attempts, applied.lease) == (9, timedelta(minutes=15))
    assert enqueue("mail").max_attempts == 9


@pytest.mark.usefixtures("sqlite_process_database")
def test_pollers_follow_and_show_what_they_applied(file: Path, settings: Any, edit: Edit, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    settings.DBTASKQUEUE = {"FILE": file, "HEARTBEAT": "100ms"}
    with polling({"work": 1}) as poller:
        edit('[queues.work]\nlease = "5m"')
        until(lambda: poller.queues["work"].settings.lease == timedelta(minutes=5))
        until(lambda: "Queue work: lease=5m<1m" in caplog.text)


def test_the_reader_is_patient_with_a_file_that_is_being_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "HALF_WRITTEN_S", 3600.0)
    monkeypatch.setattr(rules, "CHECK_INTERVAL_S", 0.0)
    assert lease_minutes() == 15
    file.write_text("")  # truncated, the rest is to come
    assert lease_minutes() == 15
    file.write_text('[queues.mail]\nlease = "2m"')
    monkeypatch.setattr(rules, "HALF_WRITTEN_S", 0.0)
    monkeypatch.setattr(conf._state.file, "_next_check", 0.0)  # type: ignore[union-attr]
    assert lease_minutes() == 2
