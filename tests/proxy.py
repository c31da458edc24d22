"""A PostgreSQL server seen through a wire that breaks at a chosen statement, stalls, goes silent, or closes by half."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO, Literal
from urllib.parse import urlsplit

from tests.patience import PATIENCE

SILENT_S = 10.0  # after which tcp_user_timeout ends a silent connection for its client
ENCRYPTION = {80877103, 80877104}  # what a client asks before anything else: SSL, GSSAPI
Loss = Literal["request", "reply"]


class Wire(threading.Thread):
    """One connection of a client to the server: this thread forwards the one way, a second one the other."""

    def __init__(self, proxy: Proxy, client: socket.socket) -> None:
        super().__init__(daemon=True)
        self._proxy, self._client = proxy, client
        self._server = socket.create_connection(proxy.address)
        self._statements: dict[bytes, str] = {}  # prepared ones, by their names
        self._seen = ""  # the statements of the present transaction
        self._doomed = False
        self.swallows = proxy.silent  # as after a firewall forgot it: forwards nothing any more, and breaks nothing

    def cut(self) -> None:
        for side in (self._client, self._server):
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    def half_close(self) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_WR)

    def run(self) -> None:
        down = threading.Thread(target=self._down, daemon=True)
        with self._client, self._server:
            down.start()
            with suppress(OSError, EOFError), self._client.makefile("rb") as stream:
                self._up(stream)
            if not self._doomed:
                self.cut()
            down.join()

    def _up(self, stream: BinaryIO) -> None:
        hello = self._hello(stream)
        if not self.swallows:
            self._server.sendall(hello)
        while True:
            kind, body = _message(stream)
            if not self._proxy.flows.is_set():
                self._proxy.held.set()
                self._proxy.flows.wait()
            text = self._statement(kind, body)
            loss = None if text is None else self._proxy.strikes(text, self._seen)
            if text is not None:
                self._seen = "" if text in ("COMMIT", "ROLLBACK") else self._seen + text
            if loss == "request":
                return
            self._doomed = self._doomed or loss == "reply"
            if not self.swallows:
                self._server.sendall(_packed(kind, body))

    def _down(self) -> None:
        with suppress(OSError, EOFError), self._server.makefile("rb") as stream:
            while True:
                kind, body = _message(stream)
                self._proxy.flows.wait()
                if self.swallows:
                    continue
                if not self._doomed:
                    self._client.sendall(_packed(kind, body))
                elif kind == b"Z":  # ready for the next statement: this one is over
                    break
        self.cut()

    def _hello(self, stream: BinaryIO) -> bytes:
        """Return the client's first message, after refusing to encrypt."""
        while True:
            head = _exactly(stream, 8)
            length, code = int.from_bytes(head[:4]), int.from_bytes(head[4:])
            if code not in ENCRYPTION:
                return head + _exactly(stream, length - 8)
            self._client.sendall(b"N")

    def _statement(self, kind: bytes, body: bytes) -> str | None:
        if kind == b"Q":
            return body.rstrip(b"\0").decode()
        if kind == b"P":
            name, text, _ = body.split(b"\0", 2)
            self._statements[name] = text.decode()
        return self._statements[body.split(b"\0", 2)[1]] if kind == b"B" else None


class Proxy:
    """Forwards connections to a server, and breaks them as it is told, from any thread."""

    def __init__(self, url: str) -> None:
        self._server = urlsplit(url)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._wires: list[Wire] = []
        self._trap: tuple[str, str, Loss] | None = None  # a statement, what came before it, and what is lost of it
        self._commits_to_lose = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.struck = threading.Event()
        self.flows = threading.Event()  # not set: a stall
        self.flows.set()
        self.held = threading.Event()  # a client has sent something in a stall
        self.silent = False  # also for connections made from now on
        self._thread.start()

    def swallow(self) -> None:
        """Forward nothing more on the present connections, and break none of them."""
        for wire in self._wires:
            wire.swallows = True

    def stall(self, *, on: bool) -> None:
        """Forward nothing, and go on later where it stopped."""
        (self.flows.clear if on else self.flows.set)()

    def black_hole(self, *, on: bool) -> None:
        """Answer nothing and reset nothing. Connections of that time stay silent when it is over.

        A client acknowledges what this proxy sends, so its tcp_user_timeout does not count. The proxy does what it
        would do: no user's processor waits for ever on a connection with the options that the documentation names.
        """
        self.silent = on
        for wire in self._wires if on else ():
            if not wire.swallows:
                wire.swallows = True
                timer = threading.Timer(SILENT_S, wire.cut)
                timer.daemon = True
                timer.start()

    def lose_commits(self, number: int) -> None:
        """Execute the next COMMITs and break their connections before the answer."""
        with self._lock:
            self._commits_to_lose += number

    def half_close(self, number: int) -> None:
        """Close the client's direction of some connections."""
        wires = [wire for wire in self._wires if wire.is_alive()]
        for wire in random.sample(wires, min(number, len(wires))):
            wire.half_close()

    @property
    def address(self) -> tuple[str, int]:
        return str(self._server.hostname), int(self._server.port or 5432)

    @property
    def url(self) -> str:
        """Return the server's address, by way of this proxy."""
        credentials, port = self._server.netloc.rpartition("@")[0], self._listener.getsockname()[1]
        return self._server._replace(netloc=f"{credentials}@127.0.0.1:{port}").geturl()

    def arm(self, statement: str, loss: Loss, *, after: str = "") -> None:
        """Break the connection of the next statement that holds a text, after another one in the same transaction.

        ``loss="request"``: the server never sees it. ``"reply"``: it is executed, but nobody is told.
        """
        self._trap = statement, after, loss

    def strikes(self, text: str, seen: str) -> Loss | None:
        """Return what is lost of a statement; its transaction has ``seen`` others."""
        with self._lock:
            if text == "COMMIT" and self._commits_to_lose:
                self._commits_to_lose -= 1
                return "reply"
            if self._trap is None or self._trap[0] not in text or self._trap[1] not in seen:
                return None
            (_, _, loss), self._trap = self._trap, None
            self.struck.set()
            return loss

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    wire = Wire(self, client)
                except OSError:  # the server is away
                    client.close()
                    continue
                wire.start()
                self._wires = [*(one for one in self._wires if one.is_alive()), wire]

    def cut(self) -> None:
        for wire in self._wires:
            wire.cut()

    def stop(self) -> None:
        """End, and break what is connected: from now on the server cannot be reached this way."""
        self.flows.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(PATIENCE)  # from now on there are no new connections
        self.cut()
        for wire in self._wires:
            wire.join(PATIENCE)


def _message(stream: BinaryIO) -> tuple[bytes, bytes]:
    head = _exactly(stream, 5)
    return head[:1], _exactly(stream, int.from_bytes(head[1:]) - 4)


def _exactly(stream: BinaryIO, size: int) -> bytes:
    found = stream.read(size)
    if len(found) < size:
        raise EOFError
    return found


def _packed(kind: bytes, body: bytes) -> bytes:
    return kind + (len(body) + 4).to_bytes(4) + body


@contextmanager
def proxied(url: str) -> Iterator[Proxy]:
    proxy = Proxy(url)
    try:
        yield proxy
    finally:
        proxy.stop()
