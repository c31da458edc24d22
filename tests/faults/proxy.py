"""A wire to PostgreSQL that stalls, goes silent, loses the answer to a COMMIT, or closes in one direction only."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

CHUNK_BYTES = 65536
COMMIT = b"COMMIT\0"
SILENT_S = 10.0  # after which tcp_user_timeout ends a silent connection for its client


class Wire:
    """One connection of a client to the server."""

    def __init__(self, proxy: Proxy, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client, self.server = client, server
        self._proxy = proxy
        self.silent = False  # from now on: as after a firewall forgot the connection
        self._doomed = False  # the answer to its COMMIT is to be lost

    async def up(self, reader: asyncio.StreamReader) -> None:
        """Forward what the client says."""
        while data := await reader.read(CHUNK_BYTES):
            await self._proxy.open.wait()
            if self.silent:
                continue
            if self._proxy.losing and COMMIT in data:
                self._proxy.losing -= 1
                self._proxy.lost += 1
                self._doomed = True
            self.server.write(data)
            await self.server.drain()

    async def down(self, reader: asyncio.StreamReader) -> None:
        """Forward what the server answers."""
        while data := await reader.read(CHUNK_BYTES):
            await self._proxy.open.wait()
            if self._doomed:
                break
            if not self.silent:
                self.client.write(data)
                await self.client.drain()
        if self._doomed:
            self.close()

    def close(self) -> None:
        """Break it, for both sides."""
        for side in (self.client, self.server):
            side.close()


class Proxy:
    """Forwards connections to one server. All methods but ``serve`` may be called from any thread."""

    def __init__(self, url: str) -> None:
        self._server = urlsplit(url)
        self._loop = asyncio.new_event_loop()
        self._wires: set[Wire] = set()
        self._unanswered: set[asyncio.StreamWriter] = set()
        self._silent = False
        self.open = asyncio.Event()
        self.losing = self.lost = 0  # answers to a COMMIT: to lose, and lost
        self.port = 0

    @property
    def url(self) -> str:
        """The address of the server by way of this proxy."""
        credentials = self._server.netloc.rpartition("@")[0]
        return self._server._replace(netloc=f"{credentials}@127.0.0.1:{self.port}").geturl()

    def stall(self, *, on: bool) -> None:
        """Forward nothing, and go on later where it stopped."""
        self._loop.call_soon_threadsafe(self.open.clear if on else self.open.set)

    def black_hole(self, *, on: bool) -> None:
        """Answer nothing and reset nothing. Connections of that time stay silent when it is over.

        A client acknowledges what this proxy sends, so its tcp_user_timeout does not count. The proxy does what it
        would do: no user's processor waits for ever on a connection with the options that the documentation names.
        """

        def switch() -> None:
            self._silent = on
            for wire in self._wires:
                if on and not wire.silent:
                    wire.silent = True
                    self._loop.call_later(SILENT_S, wire.close)

        self._loop.call_soon_threadsafe(switch)

    def lose_commits(self, number: int) -> None:
        """Execute the next COMMITs and break their connections before the answer."""
        self.losing += number

    def half_close(self, number: int) -> None:
        """Close the client's direction of some connections; the server's stays open."""

        def close() -> None:
            for wire in random.sample(sorted(self._wires, key=id), min(number, len(self._wires))):
                with suppress(OSError):
                    wire.server.write_eof()

        self._loop.call_soon_threadsafe(close)

    def serve(self, ready: threading.Event) -> None:
        """Run until ``end``."""

        async def main() -> None:
            self.open.set()
            server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            ready.set()

        self._loop.create_task(self._reported(main()))
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())

    def end(self) -> None:
        """Break all connections."""

        def close() -> None:
            for wire in self._wires:
                wire.close()
            self._loop.stop()

        self._loop.call_soon_threadsafe(close)

    async def _accept(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        await self._reported(self._serve_client(reader, client))

    async def _serve_client(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        if self._silent:
            self._unanswered.add(client)  # a writer that nobody holds is closed
            with suppress(OSError):
                while await reader.read(CHUNK_BYTES):
                    pass
            self._unanswered.discard(client)
            client.close()
            return
        try:
            answers, server = await asyncio.open_connection(self._server.hostname, self._server.port)
        except OSError:
            client.close()
            return
        wire = Wire(self, client, server)
        self._wires.add(wire)
        ways = [asyncio.ensure_future(self._reported(way)) for way in (wire.up(reader), wire.down(answers))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        if ways[0].done() and not wire.silent:  # half closed: the server may still have something to say
            with suppress(OSError, RuntimeError):
                server.write_eof()
            await asyncio.wait(ways[1:], timeout=1)
        wire.close()
        self._wires.discard(wire)
        for way in ways:
            way.cancel()

    @staticmethod
    async def _reported(way: Coroutine[Any, Any, None]) -> None:
        with suppress(OSError, asyncio.CancelledError):
            await way


@contextmanager
def proxied(url: str) -> Iterator[Proxy]:
    """A proxy before a server, for the time of a ``with`` block."""
    proxy, ready = Proxy(url), threading.Event()
    thread = threading.Thread(target=proxy.serve, args=[ready], name="proxy", daemon=True)
    thread.start()
    ready.wait(10)
    try:
        yield proxy
    finally:
        proxy.end()
        thread.join(10)
