"""The files for deploying: their own tools or schemas accept them, their commands start, and their queries run."""

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from datetime import timedelta
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.contrib.postgres.functions import TransactionNow

from django_dbtaskqueue import enqueue
from django_dbtaskqueue.core.durations import parse_duration
from django_dbtaskqueue.management.commands.runtaskpoller import Command
from django_dbtaskqueue.models import Queue, Task
from django_dbtaskqueue.poller.probe_port import STUCK_S
from tests.conftest import ProcessDatabase
from tests.docs.pages import free_port
from tests.docs.test_reference import DOCS, page
from tests.locations.test_roles import roles  # noqa: F401 -- a fixture
from tests.operations.site import refused
from tests.poller.processes import runtaskpoller
from tests.poller.test_probe_port import status
from tests.support import sql, until

FILES = DOCS / "files/deploy"
UNIT, DOCKERFILE, PROCFILE = FILES / "taskpoller.service", FILES / "Dockerfile", FILES / "Procfile"
COMPOSE = yaml.safe_load((FILES / "compose.yaml").read_text())
MIGRATE, DEPLOYMENT = yaml.safe_load_all((FILES / "kubernetes.yaml").read_text())
AUTHENTICATION, SCALED = yaml.safe_load_all((FILES / "keda.yaml").read_text())
(CONTAINER,) = DEPLOYMENT["spec"]["template"]["spec"]["containers"]
PROBES = ("startup", "readiness", "liveness")
# The fields of KEDA's ScaledObject that ours may use; metadata are those of its PostgreSQL scaler.
SCALED_FIELDS = {"scaleTargetRef", "minReplicaCount", "maxReplicaCount", "pollingInterval", "advanced", "triggers"}
TRIGGER_FIELDS = {"type", "name", "metricType", "metadata", "authenticationRef"}
SCALER_FIELDS = {"host", "port", "userName", "dbName", "sslmode", "query", "targetQueryValue"}


def service() -> configparser.SectionProxy:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(UNIT.read_text())
    return unit["Service"]


def options(name: str) -> list[str]:
    dockerfile = re.findall(r"^CMD (.*)$", DOCKERFILE.read_text(), re.MULTILINE)
    words = {
        "systemd": shlex.split(service()["ExecStart"]), "docker": json.loads(dockerfile[0]),
        "compose": COMPOSE["services"]["poller"]["command"], "kubernetes": CONTAINER["command"] + CONTAINER["args"],
        "procfile": shlex.split(yaml.safe_load(PROCFILE.read_text())["poller"]),
    }[name]  # fmt: skip
    return words[words.index("runtaskpoller") + 1 :]


def parsed(name: str) -> Any:
    return Command().create_parser("manage.py", "runtaskpoller").parse_args(options(name))


def test_the_page_names_each_file_and_each_command_is_one_of_ours_and_ends_before_it_is_killed() -> None:
    named = re.findall(r"\.\./files/deploy/([\w.]+)\)", page("howto/deploy.md"))
    assert sorted(set(named)) == sorted(one.name for one in FILES.iterdir())
    graces = {
        "systemd": float(service()["TimeoutStopSec"]),
        "compose": parse_duration(COMPOSE["services"]["poller"]["stop_grace_period"]).total_seconds(),
        "kubernetes": DEPLOYMENT["spec"]["template"]["spec"]["terminationGracePeriodSeconds"],
        "procfile": 30.0,  # of Heroku, which nothing can change
    }
    for name, grace in graces.items():
        assert parsed(name).shutdown_timeout.total_seconds() < grace, name
    assert (service()["Type"], float(service()["WatchdogSec"]) > STUCK_S) == ("notify", True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["systemd", "docker", "compose", "kubernetes"])
def test_a_command_starts_a_poller_that_ends_when_asked(name: str, postgres_process_database: ProcessDatabase) -> None:
    port = free_port()
    with runtaskpoller(postgres_process_database, *options(name), "--metrics-port", str(port)) as poller:
        until(lambda: "Probes and metrics" in poller.log or poller.code is not None)
        for path in [CONTAINER[f"{kind}Probe"]["httpGet"]["path"] for kind in PROBES]:
            until(lambda path=path: status(port, path.removeprefix("/healthz/")) == 200)  # type: ignore[misc]
        enqueue("work", "one")
        until(lambda: Task.objects.filter(status="COMPLETED").exists())
        if name == "compose":
            check = [word.replace("9187", str(port)) for word in COMPOSE["services"]["poller"]["healthcheck"]["test"]]
            assert check[:2] == ["CMD", "python"]
            subprocess.run([sys.executable, *check[2:]], check=True)
        poller.signal(signal.SIGTERM)
        poller.ended()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    good = UNIT.read_text().replace("/srv/mysite/venv/bin/python", sys.executable)
    for text, told in ((good, ""), (good.replace("WatchdogSec=330", "WatchdogSecs=330"), "WatchdogSecs")):
        unit.write_text(text)
        done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
        assert told in done.stderr and (told or (done.returncode, done.stdout + done.stderr) == (0, ""))


def test_hadolint_accepts_the_dockerfile() -> None:
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("the extra test is not installed")
    done = subprocess.run([program, "--no-color", str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_compose_file_is_as_its_specification_says() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    pytest.importorskip("check_jsonschema", reason="the extra test is not installed")
    schema = json.loads((resources.files("check_jsonschema.builtin_schemas.vendor") / "compose-spec.json").read_text())
    jsonschema.validate(COMPOSE, schema)
    services = COMPOSE["services"]
    wrong = {**COMPOSE, "services": {**services, "poller": {**services["poller"], "stop_grace": "40s"}}}
    refused(None, jsonschema.validate, wrong, schema, error=jsonschema.ValidationError)
    waited = [pair for one in services.values() for pair in one.get("depends_on", {}).items()]
    healthy = {name for name, wanted in waited if wanted["condition"] == "service_healthy"}
    assert [name for name in healthy if "healthcheck" not in services[name]] == [], "no health check to wait for"


@pytest.mark.parametrize("manifest", [MIGRATE, DEPLOYMENT], ids=["migrate", "deployment"])
def test_kubernetes_knows_each_field(manifest: dict[str, Any]) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="the extra test is not installed")
    version = validator.latest_version()
    validator.validate(manifest, version, strict=True)
    wrong = {**manifest, "spec": {**manifest["spec"], "gracePeriod": 75}}
    refused(None, validator.validate, wrong, version, strict=True, error=validator.ValidationError)


def test_the_probes_and_labels_of_the_manifest_fit() -> None:
    (port,) = CONTAINER["ports"]
    assert parsed("kubernetes").metrics_port == ("0.0.0.0", port["containerPort"])  # noqa: S104 -- as in the file
    assert {CONTAINER[f"{kind}Probe"]["httpGet"]["port"] for kind in PROBES} == {port["name"]}
    spec = DEPLOYMENT["spec"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    (migrating,) = MIGRATE["spec"]["template"]["spec"]["containers"]
    assert migrating["image"] == CONTAINER["image"]


def answers() -> dict[str, int]:
    sql("SET LOCAL ROLE dbtaskqueue_reader")
    found = {trigger["name"]: sql(trigger["metadata"]["query"])[0][0] for trigger in SCALED["spec"]["triggers"]}
    sql("RESET ROLE")
    return found


def test_the_scaler_s_queries_say_what_is_due_and_since_when(roles: None) -> None:  # noqa: F811 -- the fixture above
    assert answers() == {"backlog": 0, "age": 0}
    queue = Queue.objects.create(name="invoices")
    rows = [enqueue("invoices", str(number)).pk for number in range(4)]
    enqueue("other", "of another poller")
    tasks, now = Task.objects.all(), TransactionNow()  # the queries' clock, which stands still in the test
    tasks.update(ready_time=now, next_process_time=now)
    tasks.filter(pk=rows[0]).update(ready_time="2026-01-01T00:00Z", next_process_time="9000-01-01T00:00Z")
    assert answers() == {"backlog": 3, "age": 0}
    earlier = now - timedelta(seconds=90)
    tasks.filter(pk=rows[1]).update(ready_time=earlier, next_process_time=earlier)
    tasks.filter(pk=rows[2]).update(status="PROCESSING", next_process_time=now + timedelta(minutes=1))
    assert answers() == {"backlog": 3, "age": 90}
    Queue.objects.filter(pk=queue.pk).update(paused_time="2026-01-01T00:00Z")
    assert answers() == {"backlog": 0, "age": 0}


def test_the_scaler_has_only_fields_that_keda_knows() -> None:
    assert set(SCALED["spec"]) <= SCALED_FIELDS
    assert SCALED["spec"]["scaleTargetRef"]["name"] == DEPLOYMENT["metadata"]["name"]
    for trigger in SCALED["spec"]["triggers"]:
        assert set(trigger) <= TRIGGER_FIELDS and set(trigger["metadata"]) == SCALER_FIELDS
        assert {type(value) for value in trigger["metadata"].values()} == {str}, "KEDA refuses numbers here"
        assert trigger["authenticationRef"]["name"] == AUTHENTICATION["metadata"]["name"]
