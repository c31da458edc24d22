"""HTTPS servers: Django's in a process of its own (``python -m``), and others on threads of the tests."""

import ssl
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
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
