"""Run inside a project, with only Django and the package: open every admin page, API route and ``taskqueue`` command.

``python visit.py STAGE``, in the folder of ``manage.py``. Prints what is wrong, and exits with 1 if anything is.

``unmigrated``  the app's tables are missing: each page, route and command says so in a sentence
``filled``      or empty: nothing fails, no user sees more than the permissions allow, each static file exists
"""

import contextlib
import io
import json
import logging
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from html import unescape
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import django
from django.conf import settings

STAGE = sys.argv[1]
LINK = re.compile(r"""(?:href|src|action)="([^"]*)\"""")
MIGRATE = "manage.py migrate"
faults: list[str] = []

logging.disable(logging.CRITICAL)  # faults are printed at the end
sys.path.insert(0, os.getcwd())
os.environ["DJANGO_SETTINGS_MODULE"] = re.findall(r"'(\w+\.settings)'", Path("manage.py").read_text())[0]
django.setup()

from django.contrib import admin  # noqa: E402 -- Django must be set up first
from django.contrib.auth.models import Permission, User  # noqa: E402 -- Django must be set up first
from django.contrib.staticfiles import finders  # noqa: E402 -- Django must be set up first
from django.core.management import call_command, get_commands, load_command_class  # noqa: E402 -- Django must be set up first
from django.core.signals import got_request_exception  # noqa: E402 -- Django must be set up first
from django.test import Client, override_settings  # noqa: E402 -- Django must be set up first
from django.urls import NoReverseMatch, get_resolver, reverse  # noqa: E402 -- Django must be set up first

from django_dbtaskqueue import registry  # noqa: E402 -- Django must be set up first
from django_dbtaskqueue.conf.settings import settings_queues  # noqa: E402 -- Django must be set up first
from django_dbtaskqueue.management.commands.taskqueue import VERB_OF_COMMAND  # noqa: E402 -- Django must be set up first
from django_dbtaskqueue.models import Task  # noqa: E402 -- Django must be set up first
from django_dbtaskqueue.operations.verbs import QUEUE_VERBS, TASK_VERBS  # noqa: E402 -- Django must be set up first

warnings.simplefilter("error")
settings.ALLOWED_HOSTS = ["testserver"]  # as Django's own test runner does
OURS = {model: page for model, page in admin.site._registry.items() if model._meta.app_label == "dbtaskqueue"}
HARMLESS = "ref:there-is-no-such-reference"
FINDING_CODE, USAGE_ERROR_CODE, SETTINGS_CODE = 1, 2, 3
QUEUE = "a-queue/with a slash"
# Parts of the API's addresses.
NO_SUCH = {"fingerprint": "0" * 40, "poller": "no:such", "command": "drain", "schedule": "no/such", "action": "run"}
API = "dbtaskqueue_api"
# The arguments of each subcommand of ``taskqueue``.
COMMANDS: dict[str, list[list[str]]] = {
    "status": [[]],
    "doctor": [[]],
    "list": [[], ["--filter", "status:ERROR payload.order:>1 age:<9d"], ["--limit", "1"]],
    "show": [["1"], ["claims/UA1545"], ["invoices/no-order"]],
    "tail": [["--count", "1"]],
    "pause": [[QUEUE, "--reason", "a visit", "--for", "1m"], [QUEUE, "--dry-run"]],
    "resume": [[QUEUE], [QUEUE, "--dry-run"]],
    "set": [[QUEUE, "rate=5/m", "max_running=5"], [QUEUE, "--reset", "rate"]],
    "settings": [[QUEUE]],
    "mask": [["--yes"]],
    "purge": [[QUEUE, "--dry-run"], [QUEUE, "--yes", "--reason", "a visit"]],
    "shards": [["show", "claims"], ["move", "claims", "--yes"]],
    "batches": [[], ["show", "1"], ["cancel", "1"], ["retry", "1"]],
    "bulk": [["list"], ["run"], ["show", "1"], ["cancel", "1"]],
    "index": [[], ["--drop"]],
    "schedules": [
        *([], ["add", "nightly", "--queue", QUEUE, "--cron", "0 3 * * *"], ["edit", "nightly", "--cron", "0 4 * * *"]),
        *([verb, "nightly"] for verb in ("show", "pause", "resume", "run", "reset")),
    ],
    "token": [["superuser"]],
    "tokens": [[], ["--revoke", "987654"]],
}
# The arguments of each other command.
OTHER_COMMANDS: dict[str, list[list[str]]] = {
    "housekeeptasks": [[], ["--delete"]],
    "runtaskpipeline": [["check"]],
    "runtaskpoller": [["--once", "--queue", "nosuch"], ["--once", "--queue", "nosuch", "--executor", "process"]],
}
# What some verbs ask for beside the tasks.
INPUTS: dict[str, dict[str, object]] = {"snooze": {"for": "1h"}, "change_priority": {"priority": 1}}
INPUTS |= {"edit": {"payload": {}}, "signal": {"signal": "approved"}}
INPUTS |= {"move": {"to_queue": next(iter(settings_queues()), QUEUE)}}


def main() -> int:
    run_commands()
    collect_static_files()
    for name, user in users().items():
        visit_pages(name, user)
        visit_api(name, user)
    print(*faults[:25], f"{len(faults)} faults in {Browser.requests} requests", sep="\n\n")
    return 1 if faults else 0


def users() -> dict[str, User | None]:
    """Return a superuser, a member of the staff who may see queues and tasks only, one who may see nothing, nobody."""
    root, _ = User.objects.get_or_create(username="superuser", is_staff=True, is_superuser=True)
    some, _ = User.objects.get_or_create(username="some", is_staff=True)
    none, _ = User.objects.get_or_create(username="none", is_staff=True)
    some.user_permissions.set(Permission.objects.filter(codename__in=["view_task", "view_queue"]))
    return {"superuser": root, "staff who may see some": some, "staff who may see nothing": none, "nobody": None}


class Browser:
    requests = 0  # of all browsers

    def __init__(self, name: str, user: User | None) -> None:
        self.name = name
        self.client = Client(raise_request_exception=False)
        if user is not None:
            self.client.force_login(user)
        self.trace = ""
        got_request_exception.connect(self._failed)

    def _failed(self, **_: object) -> None:
        self.trace = "".join(traceback.format_exception(*sys.exc_info()))

    def send(self, method: str, address: str, body: object = None) -> Any:
        """Send a request; a server error is a fault, except the sentence about missing tables."""
        self.trace = ""
        Browser.requests += 1
        options = {} if body is None else {"data": json.dumps(body), "content_type": "application/json"}
        response = getattr(self.client, method)(address, **options)
        text = response.content.decode(errors="replace") if not response.streaming else ""
        said = STAGE == "unmigrated" and MIGRATE in unescape(text)
        if self.trace or (response.status_code >= 500 and not said):
            faults.append(f"{self.name}: {method} {address}: {response.status_code}\n{self.trace or text[:2000]}")
        if said and response.status_code != 503 and "/doctor/" not in address:  # to the doctor it is a finding
            faults.append(f"{self.name}: {method} {address} says that tables are missing, with {response.status_code}")
        return response


def visit_pages(name: str, user: User | None) -> None:
    browser, waiting, static, opened = Browser(name, user), dict.fromkeys(admin_addresses()), set[str](), 0
    seen, most = [], len(waiting) + 60
    while len(seen) < min(most, len(waiting)):  # which grows, and keeps its order
        seen.append(address := list(waiting)[len(seen)])
        response = browser.send("get", address)
        opened += response.status_code == 200
        if response.status_code != 200 or response.streaming or "text/html" not in response["Content-Type"]:
            continue
        text = response.content.decode()
        if user is None:
            faults.append(f"nobody may open {address}")
        for link in map(unescape, LINK.findall(text)):
            found = urlsplit(urljoin(address, link))
            if found.netloc or found.scheme:
                continue
            if found.path.startswith(settings.STATIC_URL):
                static.add(found.path.removeprefix(settings.STATIC_URL))
            elif found.path.startswith(reverse("admin:app_list", args=["dbtaskqueue"])):
                waiting[found._replace(fragment="").geturl()] = None
    faults.extend(f"{name}: static file {file} is missing" for file in sorted(static) if not finders.find(file))
    if name == "superuser" and STAGE != "unmigrated":
        if opened < len(OURS):
            faults.append(f"only {opened} pages were opened: {sorted(seen)}")
        if not any(file.startswith("dbtaskqueue/") for file in static):
            faults.append(f"no page uses a static file of ours: {sorted(static)}")
        ask_for_each_action(browser)


def admin_addresses() -> Iterator[str]:
    """Yield every address that our admin classes have, those of a row with the newest row and with one that is not."""
    yield reverse("admin:index")
    yield reverse("admin:app_list", args=["dbtaskqueue"])
    for model, page in OURS.items():
        changelist = reverse(f"admin:dbtaskqueue_{model._meta.model_name}_changelist")
        yield from (changelist + query for query in ("", "?_live=1", "?q=status:ERROR", "?q=no:such", "?page=2"))
        for name in filter(None, (pattern.name for pattern in page.get_urls())):
            for pk in ids_of(model):
                with contextlib.suppress(NoReverseMatch):
                    address = reverse(f"admin:{name}", args=[pk])
                    yield from (address, f"{address}?_live=1")


def ids_of(model: Any) -> list[object]:
    if STAGE == "unmigrated" or not model._meta.db_table:
        return [987654]
    return [*model._default_manager.order_by("-pk").values_list("pk", flat=True)[:1], 987654]


def ask_for_each_action(browser: Browser) -> None:
    """Ask for every action on the newest tasks: the page that wants a confirmation changes nothing."""
    for pk in Task.objects.order_by("-pk").values_list("pk", flat=True)[:3]:
        for verb in TASK_VERBS:
            address = reverse("admin:dbtaskqueue_task_changelist")
            response = browser.client.post(address, {"action": verb, "_selected_action": pk})
            if response.status_code not in (200, 302):
                faults.append(f"action {verb} on task {pk}: {response.status_code}\n{browser.trace}")


def collect_static_files() -> None:
    """Collect the static files as for production, where each name in a style sheet or script must be found."""
    manifest = {"BACKEND": "django.contrib.staticfiles.storage.ManifestStaticFilesStorage"}
    with tempfile.TemporaryDirectory() as root:
        try:
            with override_settings(STATIC_ROOT=root, STORAGES={**settings.STORAGES, "staticfiles": manifest}):
                call_command("collectstatic", interactive=False, verbosity=0)
        except Exception:
            faults.append(f"collectstatic\n{traceback.format_exc()}")


def visit_api(name: str, user: User | None) -> None:
    """Send both methods to every route of the API, if the project has it among its URLs."""
    browser = Browser(name, user)
    for address in api_addresses():
        for method, body in (("get", None), ("post", {})):
            response = browser.send(method, address, body)
            let_in = user is None and response.status_code not in (401, 405)
            if response["Content-Type"] != "application/json" or let_in:
                said = response["Content-Type"], response.status_code, response.content[:500]
                faults.append(f"{name}: {method} {address} with {body}: {said}")


def api_addresses() -> Iterator[str]:
    _, routes = get_resolver().namespace_dict.get(API, ("", None))
    for route in {name for name in routes.reverse_dict if isinstance(name, str)} if routes else ():
        params = routes.reverse_dict.getlist(route)[0][0][0][1]
        verbs, pks = (*TASK_VERBS, *QUEUE_VERBS) if "verb" in params else [""], (1, 987654) if "pk" in params else (1,)
        for verb, pk in product(verbs, pks):
            values = {"pk": pk, "queue": QUEUE, "verb": verb, **NO_SUCH}
            yield reverse(f"{API}:{route}", kwargs={name: values[name] for name in params})


def option(key: str, value: object) -> list[str]:
    return [f"--{key.replace('_', '-')}", value if isinstance(value, str) else json.dumps(value)]


def run_commands() -> None:
    parser = load_command_class("django_dbtaskqueue", "taskqueue").create_parser("manage.py", "taskqueue")
    (subparsers,) = [action for action in parser._actions if action.dest == "command"]
    cases = dict(COMMANDS)
    for command, verb in VERB_OF_COMMAND.items():
        given = [part for key, value in INPUTS.get(verb, {}).items() for part in option(key, value)]
        which = [["--id", "1"]] if verb not in TASK_VERBS else [["--id", "1"], ["--filter", HARMLESS]]
        cases[command] = [[*one, *given, "--dry-run"] for one in which]
    if set(subparsers.choices) != set(cases):
        faults.append(f"taskqueue has other subcommands than those visited: {set(subparsers.choices) ^ set(cases)}")
    for name, calls in cases.items():
        for arguments in calls:
            run_command("taskqueue", name, *arguments)
            run_command("taskqueue", name, "--json", *arguments)
    ours = {name for name, app in get_commands().items() if app == "django_dbtaskqueue"}
    if ours != {"taskqueue", *OTHER_COMMANDS}:
        faults.append(f"There are other commands than those visited: {ours ^ {'taskqueue', *OTHER_COMMANDS}}")
    for name, calls in OTHER_COMMANDS.items():
        for arguments in calls:
            run_command(name, *arguments)
    if STAGE == "unmigrated" and registry.queues():
        run_command("runtaskpoller", "--once")


def run_command(name: str, *arguments: str) -> None:
    """Run a command as from a shell: it may refuse in a sentence, and never with a traceback."""
    said, code = io.StringIO(), 0
    # The system check says the same each time: the command "check" of a project runs it, and the others here.
    words = ["manage.py", name, *(["--skip-checks"] if name == "taskqueue" else []), *arguments]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            load_command_class("django_dbtaskqueue", name).run_from_argv(words)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(bool(error.code))
            print(error.code if isinstance(error.code, str) else "")  # as the interpreter does
        except BaseException:
            faults.append(f"{' '.join(words)}\n{traceback.format_exc()}")
    text = said.getvalue()
    needless = any(words in text for words in ("not PostgreSQL", "needs PostgreSQL", "nothing to do"))
    reads = not {"token", "check", "nosuch"}.intersection(arguments) and arguments[-2:] != (QUEUE, "--dry-run")
    expected = FINDING_CODE if "doctor" in arguments else SETTINGS_CODE
    if STAGE == "unmigrated" and reads and not needless and (code != expected or MIGRATE not in text):
        faults.append(f"{' '.join(words)} does not say what to do without tables: exit {code}\n{text}")
    if code == USAGE_ERROR_CODE and STAGE != "unmigrated":
        faults.append(f"{' '.join(words)} cannot be read: {text}")
    if code and not text.strip():
        faults.append(f"{' '.join(words)} fails without a word: exit {code}")
    if "Traceback" in text and "show" not in arguments:
        faults.append(f"{' '.join(words)}\n{text}")


sys.exit(main())
