"""``DBTASKQUEUE["EMBEDDED_POLLER"]``: a poller on threads of the web process, for a site of one process.

It starts with the first request, which is where a web process differs from everything else: a management command, a
test, the parent of an autoreloader and the master of a pre-forking server get none. A process that is forked later has
no threads of its parent, so it starts a poller of its own with its first request.
"""

from __future__ import annotations

import atexit
import socket
import threading
from collections.abc import Mapping
from datetime import timedelta

from django.core import mail
from django.core.exceptions import ImproperlyConfigured
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.wsgi import WSGIHandler
from django.core.signals import request_started
from django.db import connections

from django_dbtaskqueue import registry
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core import logger
from django_dbtaskqueue.core.durations import clock, next_pause
from django_dbtaskqueue.core.threads import WatchedThread, after_fork
from django_dbtaskqueue.db.session import migrated
from django_dbtaskqueue.poller.heartbeat import Heartbeat
from django_dbtaskqueue.poller.lifetime import DRAIN, RUN, ShutdownRequest, run_to_end
from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.poller.queue_state import Options

EXIT_TIMEOUT = timedelta(seconds=10)  # that running tasks get when the web process ends; servers kill after 30 s or so
EXIT_MARGIN_S = 5.0  # for the last outcomes and the last heartbeat
EMBEDDED_RESTART_PAUSES_S = 1.0, 60.0  # between two starts of a poller that fails: at first, and at most
HEALTHY_S = 60.0  # a poller that ran so long is started again without a long pause


class EmbeddedPoller:
    """Keeps a poller running on threads of this process until ``stop``."""

    def __init__(self) -> None:
        self._shutdown = ShutdownRequest()
        self._stopping = threading.Event()
        self._thread = WatchedThread(target=self._serve, name="dbtaskqueue-embedded", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Release what has not started, give running tasks ``EXIT_TIMEOUT``, and end."""
        self._shutdown.request(DRAIN)
        self._stopping.set()
        self._thread.join(EXIT_TIMEOUT.total_seconds() + EXIT_MARGIN_S)

    def _serve(self) -> None:
        pause = 0.0
        while self._shutdown.level == RUN:
            began = clock.monotonic()
            try:
                left = self._run()
            except Exception as error:  # the database is away or not migrated, or the settings are wrong
                left = [f"The poller of the web process does not start: {error}"]
            finally:
                connections.close_all()
            for text in left:
                logger.error("%s", text)
            if not left:
                return  # an operator stopped it, or the web process ends
            pause = next_pause(0.0 if clock.monotonic() - began > HEALTHY_S else pause, *EMBEDDED_RESTART_PAUSES_S)
            clock.wait(self._stopping, pause)

    def _run(self) -> list[str]:
        """Run a poller to its end; return what went wrong."""
        queues, options = chosen_queues()
        registry.check_databases(queues, None)
        with migrated():
            poller = Poller(queues, options)
        connections.close_all()  # this thread needs none from here on
        logger.info("Poller %s of the web process polls %s", poller.instance, ", ".join(queues))
        left = run_to_end(poller, Heartbeat(poller), self._shutdown, timeout=EXIT_TIMEOUT)
        logger.info("Poller %s of the web process has ended", poller.instance)
        return left


def chosen_queues() -> tuple[dict[str, int], Options]:
    """Return the queues and options of the setting, without queues whose processors name an executor.

    Raise ``ImproperlyConfigured`` if one of those is named, and for what ``runtaskpoller --queue`` refuses.
    """
    settings = conf.settings()
    given = settings.embedded_poller if isinstance(settings.embedded_poller, Mapping) else {}
    queues = registry.weights_of(given.get("queues", ()), given.get("exclude", ()))
    elsewhere = {queue for queue in queues if any(made.executor is not None for made in registry.processors(queue))}
    if elsewhere and (given.get("queues") or elsewhere.issuperset(queues)):
        raise ImproperlyConfigured(
            f"The poller of the web process runs no processor that names an executor: that of {min(elsewhere)!r} does. "
            "Run manage.py runtaskpoller for it."
        )
    if elsewhere:
        logger.warning("Queues %s are left to runtaskpoller: their processors name an executor", sorted(elsewhere))
    options = Options(
        threads=given.get("threads", settings.threads),
        coroutines=given.get("coroutines", Options().coroutines),
        tags=tuple(given.get("tags", ())),
        name=f"{socket.gethostname()}-web",
    )
    return {queue: weight for queue, weight in queues.items() if queue not in elsewhere}, options


# -- start and end -----------------------------------------------------------------------------------------------------

_embedded: EmbeddedPoller | None = None


def start_with_the_first_request() -> None:
    """Have the poller started when this process, or one forked from it, gets a request from a web server."""
    after_fork(_await_request)
    atexit.register(stop)
    _await_request()


def stop() -> None:
    """End the poller of this process, if there is one."""
    if _embedded is not None:
        _embedded.stop()


def _begin(sender: type, **_: object) -> None:
    """Start the poller. The handlers of test clients are no web servers, and a test may run a live server."""
    global _embedded
    is_of_server = issubclass(sender, WSGIHandler | ASGIHandler) and not hasattr(mail, "outbox")
    if is_of_server and request_started.disconnect(dispatch_uid="dbtaskqueue-embedded"):  # true of one request only
        _embedded = EmbeddedPoller()


def _await_request() -> None:
    global _embedded
    _embedded = None
    request_started.connect(_begin, dispatch_uid="dbtaskqueue-embedded")
