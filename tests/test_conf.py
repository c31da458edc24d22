"""Settings: what is wrong with one is said before any task depends on it, with its name, its value and the fix."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_dbtaskqueue import conf, processor, registry
from django_dbtaskqueue.lease import Lease
from django_dbtaskqueue.testing import TaskQueueKit


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "DBTASKQUEUE must be a dict, not list"),
        ({"QUEUS": {}}, "DBTASKQUEUE has no key 'QUEUS'. Did you mean 'QUEUES'?"),
        ({"THREADS": 0}, "DBTASKQUEUE['THREADS']=0 is not valid: a whole number of at least 1"),
        ({"THREADS": "4"}, "DBTASKQUEUE['THREADS']='4' is not valid"),
        ({"NOTIFY": "no"}, "DBTASKQUEUE['NOTIFY']='no' is not valid: True or False"),
        ({"PREPARE": 1}, "DBTASKQUEUE['PREPARE']=1 is not valid"),
        ({"HEARTBEAT": "0s"}, "DBTASKQUEUE['HEARTBEAT']=datetime.timedelta(0) is not valid: a positive duration"),
        ({"HEARTBEAT": 5}, 'DBTASKQUEUE["HEARTBEAT"] must be a timedelta or text such as "15m", not 5'),
        ({"PAYLOAD_MAX_BYTES": "1MB"}, "DBTASKQUEUE['PAYLOAD_MAX_BYTES']='1MB' is not valid"),
        ({"DATABASE": None}, "DBTASKQUEUE['DATABASE']=None is not valid: an alias of DATABASES"),
        ({"QUEUES": ["a"]}, 'DBTASKQUEUE["QUEUES"] must be a dict'),
        ({"QUEUES": {"a b": {}}}, "'a b' cannot be a queue's name"),
        (
            {"QUEUES": {"a": {"lase": "1m"}}},
            "['a'] has no setting 'lase'. Did you mean 'lease'?",
        ),
        ({"QUEUES": {"a": {"lease": 60}}}, "DBTASKQUEUE[\"QUEUES\"]['a']['lease'] must be a timedelta"),
        (
            {"QUEUES": {"a": {"lease": "1ms"}}},
            "lease=datetime.timedelta(microseconds=1000) is not valid",
        ),
        ({"QUEUES": {"a": {"retry": 5}}}, "DBTASKQUEUE[\"QUEUES\"]['a']['retry']: 5 is no retry policy"),
        (
            {"QUEUES": {"a": {"retry": "geo:1s"}}},
            "['a']['retry']: 'geo:1s' names no retry policy",
        ),
        ({"DEFAULTS": {"keep": "no"}}, "DBTASKQUEUE[\"DEFAULTS\"]: keep='no' is not valid"),
    ],
)
def test_a_bad_setting_is_named(settings: Any, given: Any, words: str) -> None:
    settings.DBTASKQUEUE = given
    with pytest.raises(ImproperlyConfigured, match=re.escape(words)):
        conf.settings()


def test_a_bad_override_is_no_other_error() -> None:
    with pytest.raises(ImproperlyConfigured, match="names no retry policy"):
        conf.overlay(conf.QueueSettings(), {"retry": "nonsense"})


def test_a_processor_says_durations_and_policies_as_the_settings_do(taskqueue_registry: None) -> None:
    @processor("letters", timeout="10m", retry="fixed:5s", lease="15m")  # type: ignore[arg-type]
    def write(task: Lease) -> None: ...

    [made] = registry.processors("letters")
    assert made.timeout == timedelta(minutes=10)
    assert made.policy(1, None) is not None
    assert conf.queue_settings("letters").lease == timedelta(minutes=15)


def test_a_bad_policy_of_a_processor_is_named(taskqueue: TaskQueueKit) -> None:
    with pytest.raises(ImproperlyConfigured, match=re.escape("@processor('letters'), retry: 5 is no retry policy")):

        @processor("letters", retry=5)
        def write(task: Lease) -> None: ...
