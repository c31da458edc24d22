"""A backend that sets the schema when a cursor is opened, as those of packages for tenants do."""

from typing import Any

from django.db.backends.postgresql.base import DatabaseWrapper as PostgreSQL


class DatabaseWrapper(PostgreSQL):
    """Connections begin in the schema ``first_schema``; ``schema`` switches to another one."""

    first_schema = "public"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.schema = self.first_schema

    def _cursor(self, name: str | None = None) -> Any:
        cursor = super()._cursor(name)
        cursor.execute(f"SET search_path = {self.schema}")
        return cursor
