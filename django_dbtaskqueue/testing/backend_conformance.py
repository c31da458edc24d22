"""What every backend of Django's tasks promises, as tests: a mixin for the test case of a backend's author.

::

    class MyBackendTests(TaskBackendConformance, TransactionTestCase):
        def run_tasks(self):
            call_command("my_worker", "--until-empty")

A test is skipped if the backend says that it does not support what the test is about.
"""

import sys
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from unittest import TestCase

from asgiref.sync import async_to_sync
from django.db import transaction
from django.dispatch import Signal
from django.utils import timezone

from django_dbtaskqueue.backend import compat
from django_dbtaskqueue.backend.compat import TaskResultStatus

calls: list[object] = []  # what the functions below were called with, in order


def give_back(*args: Any, **kwargs: Any) -> list[Any]:
    """Return the arguments."""
    calls.append(args[0] if args else None)
    return [list(args), kwargs]


async def give_back_async(*args: Any, **kwargs: Any) -> list[Any]:
    """Return the arguments, as a coroutine function."""
    return [list(args), kwargs]


def fail(message: str) -> None:
    """Raise ``ValueError``."""
    raise ValueError(message)


def exit_process() -> None:
    """Raise ``SystemExit``."""
    sys.exit("a task does not end its worker")


def return_function() -> Callable[[], None]:
    """Return what JSON cannot hold."""
    return return_function  # type: ignore[return-value]


def tell_context(context: Any, word: str) -> list[Any]:
    """Return what the context says."""
    return [context.attempt, context.task_result.id, word]


def set_metadata(context: Any, *, fails: bool) -> None:
    """Change the metadata: saved at once, and left to the end."""
    context.metadata["saved"] = True
    context.save_metadata()
    context.metadata["left"] = [1, 2]
    if fails:
        raise ValueError("after the metadata")


class TaskBackendConformance(TestCase if TYPE_CHECKING else object):  # type: ignore[misc]
    """Mix it into a ``TransactionTestCase``, and say in ``run_tasks`` how your worker works off what is due."""

    backend = "default"
    database = "default"
    queue_name = "default"

    def run_tasks(self) -> None:
        """Run all tasks that are due, and return when they have ended."""
        raise AssertionError("Define run_tasks(): it runs your worker until nothing is due.")

    def setUp(self) -> None:
        super().setUp()
        calls.clear()

    @property
    def _backend(self) -> compat.BaseTaskBackend:
        return compat.task_backends[self.backend]

    def _task(self, function: Callable[..., Any], **options: Any) -> compat.AnyTask:
        return self._backend.task_class(func=function, backend=self.backend, queue_name=self.queue_name, **options)

    def _needs(self, flag: str) -> None:
        if not getattr(self._backend, flag, False):
            self.skipTest(f"The backend does not say {flag}.")

    def _ran(self, result: compat.AnyResult) -> compat.AnyResult:
        self._needs("supports_get_result")
        self.run_tasks()
        result.refresh()
        return result

    def _signals(self) -> list[tuple[str, object, TaskResultStatus, BaseException | None]]:
        """Return a list that each signal is added to, until the end of the test."""
        received: list[tuple[str, object, TaskResultStatus, BaseException | None]] = []
        names = {compat.task_enqueued: "enqueued", compat.task_started: "started", compat.task_finished: "finished"}

        def receive(signal: Signal, sender: object, task_result: compat.AnyResult, **_: object) -> None:
            received.append((names[signal], sender, task_result.status, sys.exc_info()[1]))

        for signal in names:
            signal.connect(receive)
            self.addCleanup(signal.disconnect, receive)
        return received

    def test_a_new_task_is_ready(self) -> None:
        """The result of ``enqueue`` says what was enqueued, and that nothing has happened yet."""
        task = self._task(give_back)
        result = task.enqueue(1, two={"three": [None, "é"]})
        self.assertIsInstance(result.id, str)
        self.assertEqual((result.task, result.backend), (task, self.backend))
        self.assertEqual((result.args, result.kwargs), ([1], {"two": {"three": [None, "é"]}}))
        self.assertEqual((result.status, result.is_finished, result.attempts), (TaskResultStatus.READY, False, 0))
        self.assertIsNotNone(result.enqueued_at)
        self.assertEqual([result.started_at, result.last_attempted_at, result.finished_at], [None] * 3)
        self.assertEqual((result.errors, result.worker_ids), ([], []))
        with self.assertRaises(ValueError):
            _ = result.return_value

    def test_a_task_runs(self) -> None:
        """A task that ran has its return value, its times in order, and one worker."""
        result = self._ran(self._task(give_back).enqueue("a", b=2))
        self.assertEqual((result.status, result.is_finished), (TaskResultStatus.SUCCESSFUL, True))
        self.assertEqual(result.return_value, [["a"], {"b": 2}])
        self.assertEqual((result.attempts, result.errors), (1, []))
        times = [result.enqueued_at, result.started_at, result.last_attempted_at, result.finished_at]
        self.assertNotIn(None, times)
        self.assertEqual(times, sorted(times, key=str))

    def test_results_are_found_again(self) -> None:
        """``get_result`` and its twin return what ``enqueue`` returned, and later what became of it."""
        self._needs("supports_get_result")
        task = self._task(give_back)
        result = task.enqueue(1)
        self.assertEqual(task.get_result(result.id), result)
        self.assertEqual(async_to_sync(task.aget_result)(result.id), result)
        self.run_tasks()
        self.assertEqual(task.get_result(result.id).return_value, [[1], {}])
        async_to_sync(result.arefresh)()
        self.assertEqual(result.status, TaskResultStatus.SUCCESSFUL)

    def test_ids_that_name_nothing(self) -> None:
        """Whatever is given as an id, it names a task or raises ``TaskResultDoesNotExist``."""
        self._needs("supports_get_result")
        task = self._task(give_back)
        real = task.enqueue().id
        for nothing in ("", "nonsense", "0", "-1", "9" * 50, "é\0", str(uuid.uuid4()), real + "0", real[:-1]):
            with self.subTest(nothing), self.assertRaises(compat.TaskResultDoesNotExist):
                task.get_result(nothing)

    def test_a_result_of_another_function(self) -> None:
        self._needs("supports_get_result")
        result = self._task(give_back).enqueue()
        with self.assertRaises(compat.TaskResultMismatch):
            self._task(fail).get_result(result.id)

    def test_a_failure(self) -> None:
        """An exception makes the task TaskResultStatus.FAILED; its class and traceback are kept."""
        result = self._ran(self._task(fail).enqueue("no such letter"))
        self.assertEqual((result.status, result.is_finished), (TaskResultStatus.FAILED, True))
        self.assertEqual([error.exception_class for error in result.errors], [ValueError] * result.attempts)
        self.assertTrue(result.errors[0].traceback.endswith("ValueError: no such letter\n"), result.errors[0])
        with self.assertRaisesRegex(ValueError, "Task failed"):
            _ = result.return_value

    def test_exit_is_a_failure(self) -> None:
        exits, after = self._task(exit_process).enqueue(), self._task(give_back).enqueue()
        self._ran(exits)
        after.refresh()
        self.assertEqual((exits.status, after.status), (TaskResultStatus.FAILED, TaskResultStatus.SUCCESSFUL))
        self.assertEqual(exits.errors[0].exception_class, SystemExit)

    def test_what_json_cannot_hold(self) -> None:
        """An argument without a JSON form is refused; a return value without one fails the task."""
        for argument in (object(), {1, 2}, give_back, timezone.now()):
            with self.subTest(argument), self.assertRaises(TypeError):
                self._task(give_back).enqueue(argument)
        result = self._ran(self._task(return_function).enqueue())
        self.assertEqual((result.status, result.errors[0].exception_class), (TaskResultStatus.FAILED, TypeError))

    def test_the_context(self) -> None:
        """A function that takes the context gets it as its first argument."""
        result = self._ran(self._task(tell_context, takes_context=True).enqueue(word="hello"))
        self.assertEqual(result.return_value, [1, result.id, "hello"])

    def test_a_coroutine_function(self) -> None:
        """Coroutine functions run, enqueued from either kind of code."""
        self._needs("supports_async_task")
        task = self._task(give_back_async)
        for result in (task.enqueue(1), async_to_sync(task.aenqueue)(1)):
            self.assertEqual(self._ran(result).return_value, [[1], {}])

    def test_the_higher_priority_is_first(self) -> None:
        self._needs("supports_priority")
        for priority in (0, -100, 100, 5):
            self._task(give_back, priority=priority).enqueue(priority)
        self.run_tasks()
        self.assertEqual(calls, [100, 5, 0, -100])

    def test_a_task_for_later(self) -> None:
        self._needs("supports_defer")
        later = self._task(give_back).using(run_after=timezone.now() + timedelta(hours=1))
        result = later.enqueue()
        self.assertEqual(result.task.run_after, later.run_after)
        self.assertEqual(self._ran(result).status, TaskResultStatus.READY)
        self.assertEqual(later.get_result(result.id).task, later)
        past = self._task(give_back).using(run_after=timezone.now() - timedelta(hours=1))
        self.assertEqual(self._ran(past.enqueue()).status, TaskResultStatus.SUCCESSFUL)

    def test_a_transaction_that_is_rolled_back(self) -> None:
        with transaction.atomic(using=self.database):
            self._task(give_back).enqueue("no")
            transaction.set_rollback(True, using=self.database)
        self.run_tasks()
        self.assertEqual(calls, [])

    def test_an_unknown_queue(self) -> None:
        if self._backend.queues:
            with self.assertRaises(compat.InvalidTask):
                self._task(give_back).using(queue_name="no-such-queue")

    def test_the_signals(self) -> None:
        """Each signal is sent once, by the backend's class, with the status of the moment."""
        kind, status = type(self._backend), TaskResultStatus
        received = self._signals()
        self._task(give_back).enqueue()
        self.assertEqual(received, [("enqueued", kind, status.READY, None)])
        self.run_tasks()
        expected = [("enqueued", kind, status.READY), ("started", kind, status.RUNNING)]
        self.assertEqual([entry[:3] for entry in received], [*expected, ("finished", kind, status.SUCCESSFUL)])

    def test_the_exception_is_there_for_the_signal(self) -> None:
        """A receiver of ``task_finished`` sees the exception as the one being handled."""
        received = self._signals()
        self._task(fail).enqueue("seen")
        self.run_tasks()
        name, _, status, error = received[-1]
        self.assertEqual((name, status, repr(error)), ("finished", TaskResultStatus.FAILED, "ValueError('seen')"))

    def test_metadata(self) -> None:
        """Metadata comes with the task, changes while it runs, and stays after success and failure."""
        self._needs("supports_metadata")
        for fails, status in ((False, TaskResultStatus.SUCCESSFUL), (True, TaskResultStatus.FAILED)):
            task = self._task(set_metadata, takes_context=True, metadata={"trace": 7, "_reserved": 1})
            result = self._ran(task.enqueue(fails=fails))
            self.assertEqual((result.status, result.attempts), (status, 1))
            shown = result.metadata  # type: ignore[attr-defined]
            self.assertEqual(shown, {"trace": 7, "saved": True, "left": [1, 2]})
            self.assertEqual(result.raw_metadata["_reserved"], 1)  # type: ignore[attr-defined]
