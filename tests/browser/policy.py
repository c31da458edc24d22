"""What the site of the browser tests is set to, and the strictest policy its pages are promised to work under."""

import os
from collections.abc import Callable
from typing import Any

from django.http import HttpRequest, HttpResponse

POLICY = "default-src 'self'"
REPAIRED = "TESTS_BROWSER_REPAIRED"  # names the file without which orders fail
HEARTBEAT = "TESTS_BROWSER_HEARTBEAT"


def queue_settings() -> dict[str, Any]:
    """Return ``DBTASKQUEUE``: pollers follow at once unless a test needs their rows to look alive for longer."""
    queues = {"orders": {}, "claims": {}, "mail": {"lease": "5m"}, "night-batch": {}}
    return {"QUEUES": queues, "HEARTBEAT": os.environ.get(HEARTBEAT, "1s")}


def csp(get_response: Callable[[HttpRequest], HttpResponse]) -> Callable[[HttpRequest], HttpResponse]:
    """Middleware: nothing inline, nothing from elsewhere."""

    def middleware(request: HttpRequest) -> HttpResponse:
        response = get_response(request)
        response.headers.setdefault("Content-Security-Policy", POLICY)  # the file of a report brings a stricter one
        return response

    return middleware
