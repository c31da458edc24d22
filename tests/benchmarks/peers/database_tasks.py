"""The task of django-tasks-db, which its worker imports by name."""

from importlib import import_module
from importlib.util import find_spec

# Django 6 brings the framework; before, it is a package.
task = import_module("django.tasks" if find_spec("django.tasks") else "django_tasks").task
done: list[int] = []


@task()
def nothing(number: int) -> None:
    done.append(number)
