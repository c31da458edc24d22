"""Settings: what is wrong with one is said before any task depends on it, with its name, its value and the fix."""

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_dbtaskqueue import enqueue, processor, registry, testing
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.queue import QueueSettings, typed
from django_dbtaskqueue.models import Queue
from tests.flow.conftest import alias as alias


def test_a_bad_setting_is_named(settings: Any) -> None:
    for given, words in [
        *(([], "DBTASKQUEUE must be a dict, not list"), ({"QUEUES": ["a"]}, 'DBTASKQUEUE["QUEUES"] must be a dict')),
        ({"QUEUS": {}}, "DBTASKQUEUE has no key 'QUEUS'. Did you mean 'QUEUES'?"),
        ({"THREADS": 0}, "DBTASKQUEUE['THREADS']=0 is not valid: a whole number from 1 to 1,000,000,000"),
        ({"HEARTBEAT": 5}, 'DBTASKQUEUE["HEARTBEAT"]: 5 is not a duration. Write'),
        ({"PAYLOAD_MAX_BYTES": "1MB"}, "DBTASKQUEUE['PAYLOAD_MAX_BYTES']='1MB' is not valid"),
        ({"DATABASE": None}, "DBTASKQUEUE['DATABASE']=None is not valid: an alias of DATABASES"),
        ({"OPERATIONS_TIMEOUT": "0s"}, "is not valid: a positive duration"),
        ({"RELEASE": 7}, "DBTASKQUEUE['RELEASE']=7 is not valid: a text of at most 100 characters"),
        ({"MASK": "password"}, "is not valid: a list of parts of keys"),
        ({"API": "yes"}, "DBTASKQUEUE['API']='yes' is not valid: True or False"),
        ({"API_TOKENS": {"ada": 1}}, "is not valid: a dict of user name to the hash"),
        ({"CAN_OPERATE": 1}, "DBTASKQUEUE['CAN_OPERATE']=1 is not valid: the dotted path of"),
        ({"QUEUES": {"a b": {}}}, "'a b' cannot be a queue's name"),
        ({"QUEUES": {"a": {"lase": "1m"}}}, "['a'] has no setting 'lase'. Did you mean 'lease'?"),
        ({"QUEUES": {"a": {"lease": 60}}}, "DBTASKQUEUE[\"QUEUES\"]['a']['lease']: 60 is not a duration"),
        ({"QUEUES": {"a": {"lease": "1ms"}}}, "lease=datetime.timedelta(microseconds=1000) is not valid"),
        ({"QUEUES": {"a": {"retry": 5}}}, "DBTASKQUEUE[\"QUEUES\"]['a']['retry']: 5 is not a retry policy"),
        ({"QUEUES": {"a": {"retry": "geo:1s"}}}, "['a']['retry']: 'geo:1s' is not a retry policy"),
        ({"QUEUES": {"a": {"extra": ["url"]}}}, "a dict of the project's own settings"),
        ({"DEFAULTS": {"keep": "no"}}, "DBTASKQUEUE[\"DEFAULTS\"]: keep='no' is not valid"),
    ]:
        settings.DBTASKQUEUE = given
        with pytest.raises(ImproperlyConfigured, match=re.escape(words)):
            conf.settings()
    with pytest.raises(ImproperlyConfigured, match="is not a retry policy"):
        conf.overlay(conf.QueueSettings(), {"retry": "nonsense"})


def test_the_release_is_the_environment_s_unless_the_project_says_it(settings: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("SENTRY_RELEASE", "shop@1")
    monkeypatch.setenv("RELEASE", "")
    for given, release in [({}, "shop@1"), ({"RELEASE": "2"}, "2")]:
        settings.DBTASKQUEUE = given
        assert conf.settings().release == release


def test_a_processor_says_durations_and_policies_as_the_settings_do(taskqueue_registry: None) -> None:
    made = registry.register("letters", print, timeout="10m", retry="fixed:5s", lease="15m")
    assert made.timeout == timedelta(minutes=10) and made.policy(1, None) is not None
    assert conf.default_settings("letters").lease == timedelta(minutes=15)
    with pytest.raises(ImproperlyConfigured, match=re.escape("@processor('letters'), retry: 5 is not a retry policy")):
        processor("letters", retry=5)(print)


@pytest.mark.usefixtures("taskqueue_registry")
def test_the_project_s_word_on_a_queue_goes_before_code_before_defaults(settings: Any) -> None:
    defaults = {"lease": "2m", "batch_size": 20, "max_attempts": 2}
    settings.DBTASKQUEUE = {"DEFAULTS": defaults, "QUEUES": {"letters": {"lease": "4m"}}}
    registry.register("letters", print, lease=timedelta(minutes=3), max_attempts=3)
    found = conf.default_settings("letters")
    assert (found.lease, found.max_attempts, found.batch_size) == (timedelta(minutes=4), 3, 20)
    assert found.poll_interval == timedelta(seconds=1)
    assert conf.default_settings("unheard-of").lease == timedelta(minutes=2)
    assert conf.default_settings("unheard-of") is conf.default_settings("another"), "a row for each queue costs nothing"


FITS: dict[str, tuple[list[Any], list[Any]]] = {
    "lease": ([timedelta(milliseconds=100), timedelta(days=1)], [timedelta(milliseconds=99), timedelta(0), None, 60]),
    "timeout": ([None, timedelta(milliseconds=1)], [timedelta(0), 5]),
    "max_attempts": ([1, 32_767], [0, -1, 32_768, 1.5, "3", None]),
    "keep": (["keep", "history", "delete"], ["archive", None, True]),
    "settle": (["batch", "each"], ["all", None]),
    "batch_size": ([1, 5_000], [0, 5_001, "10"]),
    "poll_interval": ([timedelta(milliseconds=1)], [timedelta(0), timedelta(seconds=-1), None]),
    **dict.fromkeys(("idle_interval", "settle_interval"), ([timedelta(milliseconds=1)], [timedelta(0), None])),
    "ttl": ([None, timedelta(seconds=1)], [timedelta(0), 1]),
    "expired": (["poison", "delete"], ["error"]),
    "capacity": ([None, 1], [0, -1, 1.5]),
    "group_retry": (["hold", "skip"], ["wait"]),
    "max_wait": ([None, timedelta(seconds=1)], [timedelta(0)]),
    "unique_over": (["table", "history"], ["archive", None]),
    "strategy": (["auto", "skip_locked", "optimistic", "shop.queues.Mine"], ["fast", None]),
    "shards": ([[], ["default", "sqlite"]], ["sqlite", ["default", "default"]]),
    "database": (["default"], [None, 5]),
}


NUMBERS = ("max_running", "burst", "burst_per_group", "capacity", "concurrency", "max_attempts")
TOO_MUCH: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(NUMBERS, (10**9 + 1, 2**63, 10**400, typed("capacity", "9" * 5000))),
    **dict.fromkeys(("rate", "rate_per_group"), (f"{10**9 + 1}/s", f"{10**400}/s", f"{'9' * 5000}/s", "5/0s")),
}


def test_what_a_queue_can_be_set_to_and_what_no_column_or_clock_can_hold() -> None:
    for name, (good, bad) in FITS.items():
        for value in good:
            assert getattr(conf.QueueSettings(**{name: value}), name) == value
        for value in bad:
            with pytest.raises(ImproperlyConfigured, match=f"^{name}="):
                conf.QueueSettings(**{name: value})
    for name, value in ((name, value) for name, values in TOO_MUCH.items() for value in values):
        with pytest.raises(ImproperlyConfigured, match=name):
            conf.overlay(QueueSettings(), {name: value})


def test_a_row_names_no_code_and_no_place() -> None:
    """The documented role of a producer may write the row, so what it says must not be imported or called."""
    router = {"router": "doctest.run_docstring_examples"}
    for override in [
        *({"strategy": "os.abort"}, {"strategy": "tests.conformance.driver.Plain"}, router, {"model": "auth.User"}),
        *({**router, "shards": ["default"]}, {"shards": ["default", "sqlite"]}, {"database": "sqlite"}),
        *({"temporary": True}, {"batch_size": 7, "router": "os.system"}),
    ]:
        with pytest.raises(ImproperlyConfigured, match=r"Queue\.overrides: .* cannot stand in a queue's row"):
            conf.overlay(conf.QueueSettings(), override)
    assert conf.overlay(conf.QueueSettings(), {"strategy": "optimistic"}).strategy == "optimistic"


@pytest.mark.django_db(databases=["default", "sqlite"])
def test_what_a_row_names_is_not_called_by_enqueue(alias: str, settings: Any, tmp_path: Path, caplog: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"letters": {}}}
    called = tmp_path / "called"
    program = f"open({str(called)!r}, 'w').close()\ndef route(*_): return 'default'\n"
    (tmp_path / "hostile_router.py").write_text(program)
    overrides = {"router": "hostile_router.route", "strategy": "hostile_router.route", "shards": [alias]}
    Queue.objects.using(alias).create(name="letters", overrides=overrides)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        enqueue("letters", using=alias)
        assert testing.drain("letters", using=alias).parked == 1
    assert not called.exists() and "Overrides of queue letters are not applied" in caplog.text


def test_names_no_queue_can_have() -> None:
    for name in ("a", "A-1", "flights.claims:eu_west", "0", "_x", "q" * 200):
        assert conf.valid_name(name) == name
    for name in ("", " ", "a b", "-a", ".a", "é", "a\n", "a\0", "q" * 201, "a'b", 'a"b', "%s", None, 5):
        with pytest.raises(ImproperlyConfigured, match="cannot be a queue's name"):
            conf.valid_name(name)
