"""JSON and times that always can be read, whatever SQL has written: no row breaks what reads it among others.

And what the tables have in common.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.expressions import Col, Expression
from django.db.models.fields.json import KeyTransform
from django.db.models.sql.compiler import SQLCompiler
from django.utils.functional import cached_property
from django.utils.translation import gettext as _

from django_dbtaskqueue.core.durations import READABLE_TIMES
from django_dbtaskqueue.core.json import read, with_big_floats

Sql = tuple[str, tuple[str | int, ...]]
# A day of the calendar: with a modifier, ``date`` makes 2026-03-03 of 2026-02-31.
SQLITE_TIME = "date({0}, '+0 days') = substr({0}, 1, 10) AND date({0}) BETWEEN '1900-01-01' AND '9900-01-01'"


def as_list(value: object) -> list[Any]:
    """Return a list of a JSON value, or an empty one for any other."""
    return value if isinstance(value, list) else []


class AsInDjango(models.Field if TYPE_CHECKING else object):  # type: ignore[misc]
    """A field that migrations know as the field of Django that it is made of."""

    def deconstruct(self) -> tuple[str, str, Sequence[object], dict[str, object]]:
        name, _path, args, options = super().deconstruct()
        options.pop("encoder", None)
        return name, f"django.db.models.{self.get_internal_type()}", args, options


class _Encoder(json.JSONEncoder):
    def encode(self, o: Any) -> str:
        return with_big_floats(super().encode(o))


class JsonField(AsInDjango, models.JSONField):
    """JSON. What Python cannot read becomes an ``Unreadable``, which can be shown and not stored.

    With ``shape``, list or dict, another value is read as an empty one, and what is in it and not ``of`` this type is
    left out. The default is an empty one, too, if there is one.
    """

    def __init__(self, *args: Any, shape: type | None = None, of: type = object, **options: Any) -> None:
        if shape is not None and not options.get("null"):
            options.setdefault("db_default", models.Value(shape(), models.JSONField()))
        super().__init__(*args, **options)
        self.encoder = None if shape else _Encoder  # what is ours has no such numbers
        self.shape, self.of = shape, of

    def from_db_value(self, value: str | None, expression: Expression, connection: BaseDatabaseWrapper) -> object:
        if value is None or isinstance(expression, KeyTransform):
            return super().from_db_value(value, expression, connection)
        found = read(value, _("This value cannot be shown: %(reason)s"))
        if self.shape is None or (found is None and self.null):
            return found
        if self.shape is list:
            return [one for one in as_list(found) if isinstance(one, self.of)]
        pairs = found.items() if isinstance(found, dict) else ()
        return {name: one for name, one in pairs if isinstance(one, self.of)}


def _in_range(compiler: SQLCompiler, sql: str, params: Sequence[str | int]) -> Sql:
    """Return the nearest time that Python can read: for another one the driver would fail, and with it all rows."""
    low, high = (f"'{time:%Y-%m-%d %H:%M:%S}" for time in READABLE_TIMES)
    if compiler.connection.vendor == "postgresql":
        low, high = f"TIMESTAMPTZ {low}+00'", f"TIMESTAMPTZ {high}+00'"
        sql = f"CASE WHEN {sql} < {low} THEN {low} WHEN {sql} > {high} THEN {high} ELSE {sql} END"
    else:
        sql = f"CASE WHEN {sql} IS NULL OR ({SQLITE_TIME.format(sql)}) THEN {sql} ELSE {low}' END"
    return sql, (*params,) * 3


class _TimeColumn(Col):
    select_format = staticmethod(_in_range)


class TimeField(AsInDjango, models.DateTimeField):  # type: ignore[type-arg]
    """A time. The database itself gives the nearest one that can be read."""

    @cached_property
    def plain(self) -> models.DateTimeField:  # type: ignore[type-arg]
        """What expressions take it for: Django does not mix classes of fields, such as this and that of ``Now()``."""
        return models.DateTimeField(null=self.null)

    def get_col(self, alias: str, output_field: models.Field | None = None) -> Col:  # type: ignore[type-arg]
        return _TimeColumn(alias, self, output_field or self.plain)


class Total(models.Sum):
    """A sum that no row can make too large: SQLite's ``sum`` ends in an error beyond 64 bits."""

    def as_sqlite(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **options: object) -> Sql:
        return super().as_sql(compiler, connection, **options, function="TOTAL")


class ReadableTime(models.Func):
    """A ``TimeField`` to calculate with, as it is read."""

    arity = 1

    def as_sql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, *_: Any, **_options: Any) -> Sql:
        return _in_range(compiler, *compiler.compile(self.get_source_expressions()[0]))


class NumberedRow(models.Model):
    """A table with a number as its key. No user gets a permission for it, unless it says so."""

    shown_by: tuple[str, ...] = ("id",)  # the columns by which a row is shown

    id: "models.Field[int, int]" = models.BigAutoField(primary_key=True)

    class Meta:
        abstract = True
        default_permissions = ()

    def __str__(self) -> str:
        return " ".join(str(getattr(self, name)) for name in self.shown_by)


def row_check(name: str, condition: models.Q) -> models.CheckConstraint:
    """Return a condition that each row meets."""
    return models.CheckConstraint(condition=condition, name=f"%(app_label)s_%(class)s_{name}")


def readable(*columns: str) -> models.CheckConstraint:
    """Return the condition that Python can read these times: another would break each page that shows the row."""
    return row_check("times", models.Q(**{f"{name}__range": READABLE_TIMES for name in columns}))


def unique(
    name: str, *fields: str, condition: models.Q | None = None, opclasses: Sequence[str] = ()
) -> models.UniqueConstraint:
    """Return the condition that no two rows have the same in all of these columns."""
    name = f"%(app_label)s_%(class)s_{name}"
    return models.UniqueConstraint(fields=fields, condition=condition, opclasses=opclasses, name=name)


def index(name: str, *fields: str, where: models.Q | None = None, **rows: object) -> models.Index:
    """Return an index, of all rows or of those that have these values. Its name has at most 30 characters."""
    condition = (where or models.Q()) & models.Q(**rows)
    return models.Index(fields=fields, condition=condition or None, name=f"%(app_label)s_{name}")
