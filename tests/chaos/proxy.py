"""A PostgreSQL server seen through a wire that breaks at a chosen statement, before it or before its answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

ENCRYPTION = {80877103, 80877104}  # what a client asks before anything else: SSL, GSSAPI
Loss = Literal["request", "reply"]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Wire:
    """One connection of a client."""

    client: Streams
    server: Streams
    statements: dict[bytes, str] = field(default_factory=dict)  # prepared ones, by their names
    seen: str = ""  # the statements of the present transaction
    doomed: bool = False

    def cut(self) -> None:
        """Break it, for both sides."""
        for _, writer in (self.client, self.server):
            writer.close()


class Proxy:
    """Forwards connections to a server; ``arm`` makes it break one of them, once."""

    def __init__(self, url: str) -> None:
        self._server = urlsplit(url)
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._armed: tuple[str, str, Loss] | None = None
        self.struck = threading.Event()
        self.port = 0

    @property
    def url(self) -> str:
        """Return the server's address, by way of this proxy."""
        credentials = self._server.netloc.rpartition("@")[0]
        return self._server._replace(netloc=f"{credentials}@127.0.0.1:{self.port}").geturl()

    def arm(self, statement: str, loss: Loss, *, after: str = "") -> None:
        """Break the connection of the next statement that holds a text, after another one in the same transaction.

        ``loss="request"``: the server never sees it. ``"reply"``: it is executed, committed too if that is what it
        does, but nobody is told.
        """
        self.struck.clear()
        self._armed = statement, after, loss

    def run(self, ready: threading.Event) -> None:
        """Serve until ``stop``."""
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._connected, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        self._loop.run_forever()
        server.close()
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self._loop.close()

    def stop(self) -> None:
        """End, from any thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server = await asyncio.open_connection(self._server.hostname, self._server.port)
        wire = Wire((reader, writer), server)
        for direction in (self._up(wire), self._down(wire)):
            task = asyncio.ensure_future(direction)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _up(self, wire: Wire) -> None:
        """From the client to the server."""
        reader, writer = wire.client[0], wire.server[1]
        with suppress(OSError, asyncio.IncompleteReadError):
            writer.write(await self._hello(wire))
            while True:
                kind, body = await _message(reader)
                text = _statement(wire, kind, body)
                if text is not None and self._armed is not None and self._hits(wire, text):
                    loss = self._armed[2]
                    self._armed = None
                    self.struck.set()
                    if loss == "request":
                        break
                    wire.doomed = True
                writer.write(_packed(kind, body))
        if not wire.doomed:
            wire.cut()

    async def _down(self, wire: Wire) -> None:
        """From the server to the client."""
        reader, writer = wire.server[0], wire.client[1]
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                kind, body = await _message(reader)
                if not wire.doomed:
                    writer.write(_packed(kind, body))
                elif kind == b"Z":  # ready for the next statement: this one is over
                    break
        wire.cut()

    async def _hello(self, wire: Wire) -> bytes:
        """Return the client's first message, after refusing to encrypt."""
        reader, writer = wire.client
        while True:
            head = await reader.readexactly(8)
            length, code = int.from_bytes(head[:4]), int.from_bytes(head[4:])
            if code not in ENCRYPTION:
                return head + await reader.readexactly(length - 8)
            writer.write(b"N")

    def _hits(self, wire: Wire, text: str) -> bool:
        statement, after, _ = self._armed or ("", "", "")
        hit = statement in text and after in wire.seen
        wire.seen = "" if text in ("COMMIT", "ROLLBACK") else wire.seen + text
        return hit


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readexactly(5)
    return head[:1], await reader.readexactly(int.from_bytes(head[1:]) - 4)


def _packed(kind: bytes, body: bytes) -> bytes:
    return kind + (len(body) + 4).to_bytes(4) + body


def _statement(wire: Wire, kind: bytes, body: bytes) -> str | None:
    """Return the SQL that a message executes, if it does."""
    if kind == b"Q":
        return body.rstrip(b"\0").decode()
    if kind == b"P":
        name, text, _ = body.split(b"\0", 2)
        wire.statements[name] = text.decode()
    if kind == b"B":
        return wire.statements[body.split(b"\0", 2)[1]]
    return None


@contextmanager
def proxied(url: str) -> Iterator[Proxy]:
    """A proxy before a server, for the time of a ``with`` block."""
    proxy, ready = Proxy(url), threading.Event()
    thread = threading.Thread(target=proxy.run, args=[ready], daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield proxy
    finally:
        proxy.stop()
        thread.join(10)
