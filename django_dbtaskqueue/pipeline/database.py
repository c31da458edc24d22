"""The tasks' database as a value that is sent to executors. It is never printed with its password.

Spark starts two processes to plan a read, which do not need psycopg: it is imported at its first use.
"""

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import quote, unquote, urlencode, urlsplit

from django_dbtaskqueue.core.exceptions import PipelineError
from django_dbtaskqueue.core.sql import Statements
from django_dbtaskqueue.core.sql.dialects import DIALECTS, Dialect, Tables

if TYPE_CHECKING:
    from adbc_driver_manager.dbapi import Connection

__all__ = ["Database"]

URL_FORMS = "postgresql://USER:PASSWORD@HOST:PORT/NAME?OPTION=VALUE or sqlite:///PATH"
SECRET_KEYWORDS = ("password", "sslpassword")
DEFAULT_LOCATION = "dbtaskqueue.task"
Params = Mapping[str, object]


def database_errors() -> tuple[type[Exception], ...]:
    """Return what the drivers raise."""
    import psycopg

    return psycopg.Error, sqlite3.Error


@contextmanager
def statement_errors(reason: str, remedy: str = "") -> Iterator[None]:
    """Raise the errors of the block's statements as PipelineError with a remedy."""
    try:
        yield
    except database_errors() as error:
        said = str(error).strip().partition("\n")[0]
        raise PipelineError(f"{reason}: {said}. {remedy}".rstrip()) from error


@dataclass(frozen=True)
class Database:
    """A PostgreSQL database (``conninfo``: libpq's keywords) or a SQLite file (``conninfo["dbname"]``: its path).

    ``tables`` are quoted names. A pickled value holds the password.
    """

    vendor: Literal["postgresql", "sqlite"]
    conninfo: Mapping[str, str] = field(repr=False)
    tables: Tables = field(default=Tables('"dbtaskqueue_task"'), repr=False)
    location: str = DEFAULT_LOCATION

    @classmethod
    def from_url(cls, url: str) -> "Database":
        """Return the database, with the default tables, of a URL like ``DATABASE_URL``. Raises PipelineError."""
        parts = urlsplit(url)
        if parts.scheme in ("postgres", "postgresql"):
            return cls("postgresql", _conninfo(url))
        path = unquote(parts.path[1:])
        if parts.scheme == "sqlite" and path and not parts.netloc:
            return cls("sqlite", {"dbname": str(Path(path).absolute())})
        start = f"{parts.scheme}://"  # the whole address may hold a password
        raise PipelineError(f"A database URL starting with {start!r} is not understood. Write {URL_FORMS}.")

    def __repr__(self) -> str:
        return f"Database({self.url_without_password!r})"

    @property
    def url_without_password(self) -> str:
        """The address as a URL without its secrets."""
        if self.vendor == "sqlite":
            return f"sqlite:///{quote(self.conninfo['dbname'])}"
        rest = {name: value for name, value in self.conninfo.items() if name not in SECRET_KEYWORDS}
        user, name = (quote(rest.pop(one, ""), safe="") for one in ("user", "dbname"))
        # A socket's folder, and several hosts or ports, stay among the options.
        host, port = ("" if {"/", ","} & {*rest.get(one, "")} else rest.pop(one, "") for one in ("host", "port"))
        place = f"[{host}]" if ":" in host else host
        options = f"?{urlencode(sorted(rest.items()))}" if rest else ""
        return f"postgresql://{user and user + '@'}{place}{port and ':' + port}/{name}{options}"

    @property
    def postgresql(self) -> bool:
        return self.vendor == "postgresql"

    @property
    def dialect(self) -> Dialect:
        return DIALECTS[self.vendor]

    @property
    def sql(self) -> Statements:
        return Statements(self.tables, self.dialect)

    def time(self, value: datetime) -> datetime | str:
        """Return a time as a statement takes it: SQLite has text in UTC. A time without a zone is in UTC."""
        value = value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)
        return value if self.postgresql else value.strftime("%Y-%m-%d %H:%M:%S.%f")

    def connect(self) -> Any:
        """Return psycopg's or sqlite3's connection, in autocommit and UTC. Raises `PipelineError` within 10 seconds."""
        try:
            if self.postgresql:
                import psycopg

                connection = psycopg.connect(self._libpq, autocommit=True)
                connection.execute("SET timezone = 'UTC'; SET datestyle = 'ISO'; SET intervalstyle = 'postgres'")
                return connection
            uri = f"{Path(self.conninfo['dbname']).as_uri()}?mode=rw"
            file = sqlite3.connect(uri, uri=True, timeout=120, isolation_level=None)
            file.execute("SELECT name FROM sqlite_master LIMIT 1").fetchall()
            return file
        except database_errors() as error:
            raise self._unusable(error) from None

    @contextmanager
    def open(self) -> "Iterator[Link]":
        """Connect, as `connect` does, for the statements of ``core.sql``."""
        with closing(self.connect()) as connection:
            yield Link(connection, self.postgresql)

    def connect_arrow(self) -> "Connection":
        """Return a new ADBC connection to PostgreSQL in autocommit. Raises PipelineError as `connect` does."""
        import adbc_driver_postgresql.dbapi as adbc

        try:
            connection: Connection = adbc.connect(self._libpq, autocommit=True)
        except adbc.Error as error:
            raise self._unusable(error) from None
        return connection

    @property
    def _libpq(self) -> str:
        words = {"connect_timeout": "10", "application_name": "dbtaskqueue-pipeline", **self.conninfo}
        escaped = {name: value.replace("\\", r"\\").replace("'", r"\'") for name, value in words.items()}
        return " ".join(f"{name}='{value}'" for name, value in escaped.items())

    def _unusable(self, error: Exception) -> PipelineError:
        of_server = "that the server runs, that this host may reach it, and the user and password"
        reason = f"The database {self.url_without_password} cannot be used: {str(error).strip()}"
        return PipelineError(f"{reason}. Check {of_server if self.postgresql else 'the path'}.")


class Link(NamedTuple):
    """A connection for the statements of ``core.sql``, whose parameters are written ``%(name)s`` for both databases."""

    connection: Any
    postgresql: bool

    def run(self, sql: str, params: Params | None = None) -> list[tuple[Any, ...]]:
        """Execute a statement; return its rows."""
        cursor = self._execute(sql, params)
        return list(cursor.fetchall()) if cursor.description else []

    def change(self, sql: str, params: Params | None = None) -> int:
        """Execute a statement; return the number of rows it wrote."""
        return int(self._execute(sql, params).rowcount)

    def _execute(self, sql: str, params: Params | None) -> Any:
        text = sql if self.postgresql else sql % {name: f":{name}" for name in params or ()}
        return self.connection.execute(text, params or {})

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All the statements inside, or none."""
        if not self.postgresql:
            self.connection.execute("BEGIN IMMEDIATE")  # which the end of the connection's block commits
        with self.connection.transaction() if self.postgresql else self.connection:
            yield


def _conninfo(url: str) -> dict[str, str]:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        found = {name: str(value) for name, value in conninfo_to_dict(url).items() if value is not None}
    except psycopg.ProgrammingError:
        found = {}  # libpq's message may contain the URL with its password
    ports = [port for port in found.get("port", "").split(",") if port]
    if not found.get("dbname") or not all(port.isdecimal() for port in ports):
        raise PipelineError(f"A postgresql:// URL is not understood, or names no database. Write {URL_FORMS}.")
    return found
