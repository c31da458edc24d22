"""HTTPS servers: Django's in a process of its own (``python -m``), and others on threads of the tests."""

import ssl
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from threading import Lock
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

PEM = str(Path(__file__).with_name("localhost.pem"))


class Handler(BaseHTTPRequestHandler):
    """Answers a POST. A client that goes away is no error."""

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class Server(ThreadingHTTPServer):
    """An HTTPS server on this host, by itself on a free port; the thread of a connection makes the handshake."""

    request_queue_size = 100

    def __init__(self, handler: type[BaseHTTPRequestHandler], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), handler)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(PEM)
        self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    @property
    def port(self) -> int:
        return self.server_address[1]

    def handle_error(self, request: object, client_address: object) -> None:
        """A broken connection is no news here."""


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[Server]:
    """A server on a thread, for the time of a ``with`` block."""
    with Server(handler) as server, ThreadPoolExecutor(1) as thread:
        thread.submit(server.serve_forever, 0.02)
        try:
            yield server
        finally:
            server.shutdown()


def lossy(port: Future[int], share: float, lost: Counter[str]) -> type[Handler]:
    """Return the handler of a proxy that loses a share of the requests, and of the answers of those that arrive."""
    random, lock = Random(15), Lock()

    class Lossy(Handler):
        def do_POST(self) -> None:
            body = self.body()
            if self.loses("request"):
                return
            server = HTTPSConnection("127.0.0.1", port.result(), context=ssl.create_default_context(cafile=PEM))
            server.request("POST", self.path, body, dict(self.headers))
            answer = server.getresponse()
            found = answer.read()
            server.close()
            if self.loses("answer"):
                return
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("server", "date", "connection"):
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(found)

        def loses(self, what: str) -> bool:
            with lock:
                hit = random.random() < share
                lost[what] += hit
            self.close_connection = self.close_connection or hit
            return hit

    return Lossy


class Site(Server, WSGIServer):
    """A server of a WSGI application."""


class SiteHandler(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""


def main() -> None:
    """Serve the site of the settings, on the port that is named or a free one, and print it."""
    from django.core.wsgi import get_wsgi_application

    server = Site(SiteHandler, *map(int, sys.argv[1:]))
    server.set_app(get_wsgi_application())
    print(server.port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
