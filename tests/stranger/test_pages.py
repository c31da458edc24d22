"""README and tutorial, word for word, with each Python of this machine; then everything there is to open is opened."""

import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings

from example_project.database import database_from_url
from tests.conftest import _created
from tests.docs.pages import Block
from tests.patience import PATIENCE
from tests.stranger.conftest import Environment
from tests.stranger.environments import REPOSITORY, Python, pythons
from tests.stranger.newcomer import Newcomer

pytestmark = pytest.mark.stranger
README, TUTORIAL = REPOSITORY / "README.md", REPOSITORY / "docs/tutorial.md"
MANAGE = ["python", "manage.py"]
SHOP = """
from django.db import models


class Order(models.Model):
    customer = models.CharField(max_length=100)
    invoiced = models.BooleanField(default=False)

    def send_invoice(self):
        self.invoiced = True
        self.save()
"""
ORDER_URL = """
from shop import views

urlpatterns += [path("order", views.place_order)]
"""
# What a bare install may bring: Django, PostgreSQL's driver, the libraries of the admin and schedules, and their needs.
BARE = {"django-dbtaskqueue", "django", "psycopg", "django-filter", "django-tables2", "cronsim"}
BARE |= {"asgiref", "sqlparse", "typing_extensions", "pip", "setuptools"}
WITHOUT_LIBPQ = {"PSYCOPG_IMPL": "binary"}  # which a bare install lacks: importing psycopg fails, as without libpq
JOB = """
from django_dbtaskqueue import enqueue, processor


@processor("jobs")
def job(task):
    return None


def begin():
    enqueue("jobs", "one")
"""
IMPORTED = """
import sys

print("imported:", sorted({"cronsim", "django_tables2", "django_filters", "django.contrib.admin"} & {*sys.modules}))
"""
SELL = """
from django.test import Client
from django_dbtaskqueue import enqueue
from django_dbtaskqueue.models import Task

print(Client(headers={"host": "localhost"}).post("/order", {"customer": "Ada"}).content)
enqueue("invoices", "no-order", {"order": 0})
enqueue("invoices", "no-order-either", {"order": 0})
Task.objects.filter(payload__order=0).update(max_attempts=1)
"""
INVOICED = "from shop.models import Order; print('invoiced:', Order.objects.filter(invoiced=True).count())"


def test_the_newest_django_is_among_those_tried() -> None:
    if pythons().keys() <= {"3.11", "3.12"}:
        text = f"there is no Python 3.13 here, only {', '.join(pythons())}; name one in STRANGER_PYTHONS"
        (pytest.fail if "CI" in os.environ else pytest.skip)(text)


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> Iterator[dict[str, Any] | None]:
    """The entry in DATABASES that the stranger's project had before; None: as startproject made it."""
    if request.param == "sqlite":
        yield None
        return
    with _created(settings.SERVER_URL) as made:
        yield database_from_url(made.url)


def test_readme(python: Python, database: dict[str, Any] | None, environment: Environment, tmp_path: Path) -> None:
    """An existing project, made with startproject, that sells something."""
    newcomer = Newcomer(tmp_path, environment(python, "readme"))
    had_shop(newcomer, database)
    newcomer.before["migrate"] = lambda: newcomer.visit("unmigrated")
    newcomer.read(README, after="## In code", until="## See it run")
    newcomer.type_python(Block("python", "mysite/urls.py", ORDER_URL, 0))
    newcomer.visit("empty")
    newcomer.run([*MANAGE, "shell", "--command", SELL])
    work_through(newcomer)
    assert "invoiced: 1" in newcomer.run([*MANAGE, "shell", "--command", INVOICED])
    newcomer.visit("filled")
    newcomer.run([*MANAGE, "makemigrations", "--check", "--dry-run"])


def work_through(newcomer: Newcomer) -> None:
    """Process: one task completes, two end in ERROR, and an operator sets one of these aside."""
    taskqueue = [*MANAGE, "taskqueue"]
    newcomer.run([*MANAGE, "runtaskpoller", "--drain"])
    newcomer.run([*taskqueue, "poison", "--filter", "ref:no-order-either", "--yes", "--reason", "there is no order 0"])
    for status in ("COMPLETED", "ERROR", "POISON"):
        assert "No task matches" not in newcomer.run([*taskqueue, "list", "--filter", f"status:{status}"])


def had_shop(newcomer: Newcomer, database: dict[str, Any] | None) -> None:
    newcomer.run(["pip", "install", "Django"] if database is None else ["pip", "install", "Django", "psycopg[binary]"])
    newcomer.run(["django-admin", "startproject", "mysite", "."])
    newcomer.run([*MANAGE, "startapp", "shop"])
    (newcomer.folder / "shop/models.py").write_text(SHOP)
    with (newcomer.folder / "mysite/settings.py").open("a") as end:
        end.write('\nINSTALLED_APPS += ["shop"]\n' + (f'DATABASES["default"] = {database!r}\n' if database else ""))
    newcomer.run([*MANAGE, "makemigrations", "shop"])
    newcomer.run([*MANAGE, "migrate"])


def test_tutorial(python: Python, environment: Environment, tmp_path: Path) -> None:
    """An empty folder; in the end a task has failed, and was corrected."""
    newcomer = Newcomer(tmp_path, environment(python, "tutorial") | WITHOUT_LIBPQ)
    follow_the_tutorial(newcomer)
    installed = {line.partition("==")[0].lower() for line in newcomer.run(["pip", "list", "--format=freeze"]).split()}
    assert installed <= BARE, f"a bare install brings {installed - BARE}"


def test_tutorial_on_postgresql(environment: Environment, tmp_path: Path) -> None:
    newcomer = Newcomer(tmp_path, environment(newest(), "readme"))
    newcomer.leaves_out = "transaction_mode"
    with _created(settings.SERVER_URL) as made:
        entry = database_from_url(made.url)

        def has_postgresql() -> None:
            newcomer.run(["pip", "install", "django-dbtaskqueue[postgres]"])
            with (tmp_path / "flightdesk/settings.py").open("a") as end:
                end.write(f'DATABASES["default"] = {entry!r}\n')

        newcomer.before["startapp"] = has_postgresql
        follow_the_tutorial(newcomer)


def follow_the_tutorial(newcomer: Newcomer) -> None:
    """Type the page, and open everything before there is a user, and at the end."""
    newcomer.while_running["runserver"] = serves_the_admin
    newcomer.before["createsuperuser"] = lambda: newcomer.visit("filled")
    newcomer.read(TUTORIAL)
    newcomer.visit("filled")
    newcomer.run([*MANAGE, "makemigrations", "--check", "--dry-run"])


def newest() -> Python:
    return list(pythons().values())[-1]


def test_a_poller_needs_neither_the_admin_nor_its_libraries(environment: Environment, tmp_path: Path) -> None:
    newcomer = Newcomer(tmp_path, environment(newest(), "tutorial") | WITHOUT_LIBPQ)
    newcomer.run(["pip", "install", "django-dbtaskqueue"])
    newcomer.run(["django-admin", "startproject", "worker", "."])
    newcomer.run([*MANAGE, "startapp", "jobs"])
    (tmp_path / "jobs/tasks.py").write_text(JOB)
    (tmp_path / "worker/urls.py").write_text("urlpatterns = []\n")
    with (tmp_path / "worker/settings.py").open("a") as end:
        end.write('INSTALLED_APPS = ["django_dbtaskqueue", "jobs"]\nMIDDLEWARE = TEMPLATES = []\n')
    newcomer.run([*MANAGE, "check"])
    newcomer.run([*MANAGE, "migrate"])
    newcomer.run([*MANAGE, "shell", "--command", "from jobs.tasks import begin; begin()"])
    newcomer.run([*MANAGE, "runtaskpoller", "--drain"])
    assert "COMPLETED" in newcomer.run([*MANAGE, "taskqueue", "show", "jobs/one"])
    assert "imported: []" in newcomer.run([*MANAGE, "shell", "--command", IMPORTED])


def test_django_s_tasks(python: Python, environment: Environment, tmp_path: Path) -> None:
    """The page about Django's tasks; Django 6 has them itself."""
    newcomer = Newcomer(tmp_path, environment(python, "tutorial") | WITHOUT_LIBPQ)
    if python.version != "3.11":
        newcomer.writes = ("django_tasks", "django.tasks")
    newcomer.read(REPOSITORY / "docs/howto/django-tasks.md")


def serves_the_admin(address: str) -> None:
    for path in ("/admin/login/?next=/admin/dbtaskqueue/task/", "/static/dbtaskqueue/operations.css"):
        with urllib.request.urlopen(address + path, timeout=PATIENCE) as answer:  # noqa: S310 -- our own server
            assert answer.status == 200, path
