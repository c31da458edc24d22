"""Functions of Django's tasks, as a project would write them in its tasks.py."""

from datetime import timedelta

from django_dbtaskqueue import Poison, Reenqueue

try:
    from django.tasks import TaskContext, task
except ImportError:
    from django_tasks import TaskContext, task


@task
def add(a: int, b: int) -> int:
    return a + b


@task(takes_context=True, max_attempts=3, backoff=timedelta(0))
def succeed_at(context: TaskContext, attempt: int) -> int:
    if context.attempt < attempt:
        raise LookupError(f"attempt {context.attempt}")
    return context.attempt


@task(takes_context=True, max_attempts=2, backoff=timedelta(0))
async def succeed_later(context: TaskContext) -> int:
    if context.attempt == 1:
        raise LookupError("attempt 1")
    return context.attempt


later: list[str] = []  # what once_more has put off


@task
def once_more(name: str) -> str | Reenqueue:
    if name in later:
        return name
    later.append(name)
    return Reenqueue(timedelta(0))


@task
def refuse() -> Poison:
    return Poison("as asked")


@task
def interrupt() -> None:
    raise KeyboardInterrupt


@task
def fail() -> None:
    raise ValueError("as asked")
