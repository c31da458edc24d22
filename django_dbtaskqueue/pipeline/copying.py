"""The answer to a COPY as a file of bytes, at a fraction of what the rows cost one by one."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg.pq import ExecStatus


class CopyStream(io.RawIOBase):
    """What ``COPY … TO STDOUT`` sends, to read in blocks. Errors of the server are psycopg's.

    libpq hands out a row at a time, and psycopg's own loop costs more per row than making Arrow of it; so this one asks
    libpq directly. Nothing else may use the connection until the end is read.
    """

    def __init__(self, connection: psycopg.Connection[Any], statement: str, params: Mapping[str, Any]) -> None:
        super().__init__()
        text = psycopg.ClientCursor(connection).mogrify(statement, params) if params else statement
        self._libpq = connection.pgconn
        self._encoding = connection.info.encoding
        self._held: bytes | memoryview = b""
        self._ended = False
        self._expect(self._libpq.exec_(text.encode()), ExecStatus.COPY_OUT)

    def readable(self) -> bool:
        """Return that it is."""
        return True

    def empty(self) -> bool:
        """Return whether nothing is left."""
        if not self._held and not self._ended:
            count, self._held = self._libpq.get_copy_data(0)
            if count < 0:
                self._end()
        return self._ended

    def read(self, size: int = -1) -> bytes:
        """Return the next rows, as many as fit into ``size`` bytes; a larger row in pieces; nothing at the end."""
        if self.empty():
            return b""
        row, room = self._held, size
        parts: list[bytes | memoryview] = []
        take = self._libpq.get_copy_data
        while len(row) <= room:
            parts.append(row)
            room -= len(row)
            count, row = take(0)
            if count < 0:
                self._end()
                return b"".join(parts)
        if not parts:
            parts, row = [row[:room]], row[room:]
        self._held = row
        return b"".join(parts)

    def _end(self) -> None:
        self._ended, self._held = True, b""
        while result := self._libpq.get_result():
            self._expect(result, ExecStatus.COMMAND_OK)

    def _expect(self, result: Any, status: ExecStatus) -> None:
        if result.status != status:
            raise psycopg.errors.error_from_result(result, encoding=self._encoding)
