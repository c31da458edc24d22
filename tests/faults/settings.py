"""The tests' settings with the queues of the fault runs, for every process of ``tests/faults``."""

import os
from base64 import b64encode
from typing import Any

from example_project.database import database_from_url
from tests.contrib.bridging.server import PEM
from tests.faults.sizes import CAPACITY, LEASE_S, LETHAL_ATTEMPTS, MAX_RUNNING, RATES
from tests.pgbouncer import HERE
from tests.settings import *  # noqa: F403 -- settings are made to be imported whole

INSTALLED_APPS = [*INSTALLED_APPS, "tests.faults"]  # noqa: F405 -- from the import above

DATABASES["second"] = database_from_url(os.environ["FAULTS_SECOND"])  # noqa: F405 -- from the import above
if os.environ.get("FAULTS_IS_SITE"):  # the process that receives what the bridge sends
    DATABASES["default"] = DATABASES["second"]  # noqa: F405 -- from the import above
    ROOT_URLCONF, ALLOWED_HOSTS = "tests.contrib.bridging.urls", [HERE]

# An innocent task may lose many attempts to processes that are killed around it.
QUEUE: dict[str, Any] = {"lease": f"{LEASE_S}s", "max_attempts": 60, "retry": "fixed:50ms", "poll_interval": "300ms"}
OTHERS = {"evented": {"keep": "history"}, "small": {"capacity": CAPACITY}, "last": {"max_attempts": 1}}
OTHERS |= {"lethal": {"max_attempts": LETHAL_ATTEMPTS}, "ticks": {"keep": "delete"}}
for name in ("plain", "effects", "grouped", "batched", "flow", "steps", "unique", "stopped", "incoming"):
    OTHERS[name] = {}
OTHERS |= {"processes": {"concurrency": 1, "keep": "history"}, "spread": {"shards": ["default", "second"]}}
OTHERS |= {"bridged": {"retry": "fixed:1s", "max_attempts": 1000}}
for name, suffix in (("limited", ""), ("wide", "_per_group")):
    rate, burst = RATES[name]
    limits = {"max_running": MAX_RUNNING[name], "rate": f"{rate}/s", "burst": burst}
    OTHERS[name] = {key + suffix: value for key, value in limits.items()}
SECRET = "whsec_" + b64encode(b"k" * 32).decode()
SHOP = {"secrets": [SECRET], "queues": ["incoming"]}
SITE = {"url": f"https://{HERE}:{os.environ['FAULTS_SITE_PORT']}/bridge/shop/", "secrets": [SECRET]}
SITE |= {"ca_file": PEM, "allow_private": True, "queue_names": {"bridged": "incoming"}}
PEERS: dict[str, Any] = {"shop": SHOP} if "FAULTS_IS_SITE" in os.environ else {"site": SITE}  # each knows the other
QUEUES = {name: QUEUE | other for name, other in OTHERS.items()}
DBTASKQUEUE = {"HEARTBEAT": "1s", "QUEUES": QUEUES, "BRIDGE": {"peers": PEERS}}

if past := os.environ.get("FAULTS_PAST_POOLER"):  # the poller's own address leads to a pooler in transaction mode
    DATABASES["default"] |= {"DISABLE_SERVER_SIDE_CURSORS": True}  # noqa: F405 -- from the import above
    DATABASES["past_pooler"] = database_from_url(past)  # noqa: F405 -- from the import above
    DBTASKQUEUE |= {"PREPARE": False, "LISTEN": {"default": "past_pooler"}}
