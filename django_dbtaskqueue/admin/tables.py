"""The tables of the lists: one column per name in ``list_display``, shown by the page's own methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import django_tables2 as tables
from django.utils.safestring import SafeString

TEMPLATE = "admin/dbtaskqueue/table.html"


class Shown(tables.Column):  # type: ignore[misc]  # publishes no types
    """A column that a page shows with a method of its own, or as it stands in the row."""

    def __init__(self, title: Any) -> None:
        super().__init__(verbose_name=title, accessor="pk", empty_values=(), orderable=False)

    def render(self, record: Any, table: Any, bound_column: Any) -> str | SafeString:
        """Return the cell; text from a row is escaped by the template."""
        page, name = table.page, bound_column.name
        method = getattr(page, name, None)
        text = method(record) if method else getattr(record, name)
        shown = "" if text is None else text
        if name in (page.list_display_links or ()) and shown != "":
            shown = page.link(shown, page.page_of(record))
        return shown if isinstance(shown, SafeString) else str(shown)


def _title(page: Any, name: str) -> Any:
    method = getattr(page, name, None)
    return method.short_description if method else page.model._meta.get_field(name).verbose_name


def table_of(page: Any, rows: Sequence[Any], *, caption: str, ticks: bool = False) -> tables.Table:
    """Return a page's rows as a table; with ``ticks`` each row can be ticked, to act on it."""
    columns: dict[str, Any] = {name: Shown(_title(page, name)) for name in page.list_display}
    columns["Meta"] = type("Meta", (), {"template_name": TEMPLATE, "orderable": False})
    table = type("Rows", (tables.Table,), columns)(list(rows))
    table.page = page
    table.caption, table.ticks = caption, ticks
    return table
