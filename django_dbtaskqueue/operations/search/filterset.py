"""The one definition of a filter over tasks, behind pages, API and command line: ``TaskFilter``."""

from __future__ import annotations

from typing import Any

import django_filters
from django import forms
from django.utils.translation import gettext_lazy as _

from django_dbtaskqueue.core.exceptions import SearchError
from django_dbtaskqueue.models.querysets import TaskQuerySet
from django_dbtaskqueue.operations.permissions import search_fault
from django_dbtaskqueue.operations.search.parse import QUALIFIERS, Qualifier, Search, Term, parse, term
from django_dbtaskqueue.operations.search.query import select


class SearchForm(forms.Form):
    """Reads every field as terms of one search."""

    user: Any = None  # who searches; None: somebody who may see everything

    def clean(self) -> dict[str, Any]:
        """Put the terms together as ``search``; a fault stands at its field."""
        given = {name: value.strip() for name, value in self.cleaned_data.items() if value and value.strip()}
        terms: list[Term] = []
        for name, value in given.items():
            try:
                terms += parse(value).terms if name == "q" else [_named(name, value)]
            except SearchError as error:
                words = _("Search %(part)s: %(reason)s") % {"part": repr(error.part), "reason": error.reason}
                self.add_error(name, words)
        search = Search() & Search(tuple(terms))
        if fault := search_fault(self.user, search):
            self.add_error(None, fault)
        return {**self.cleaned_data, "search": search}


def _named(name: str, value: str) -> Term:
    return term(name, value.removeprefix("-"), negated=value.startswith("-"))


class TaskFilter(django_filters.FilterSet):  # type: ignore[misc]  # it publishes no types
    """``TaskFilter({"q": "status:ERROR", "queue": "claims"}, queryset=Task.objects.all()).qs``.

    ``q`` is a search; each qualifier is a field of its own, too, with what would stand after its colon. A filter with
    a fault selects nothing at all, and says why in ``errors``; ``checked()`` raises it instead.
    """

    q = django_filters.CharFilter(label=_("Search"))

    class Meta:
        form = SearchForm

    @property
    def form(self) -> Any:
        """The form; with a ``request``, what its user may not see cannot be searched in, either."""
        found = super().form
        found.user = getattr(self.request, "user", None)
        return found

    def filter_queryset(self, queryset: TaskQuerySet) -> TaskQuerySet:
        """Return the tasks that fit; none when the filter has a fault."""
        return queryset.none() if self.errors else select(self.search, queryset)

    @property
    def search(self) -> Search:
        """All that was asked for, as one search: its text and address are ``search.to_text`` and ``to_url`` of it."""
        found: Search = (
            self.form.cleaned_data.get("search", Search()) if self.is_bound and not self.errors else Search()
        )
        return found

    def checked(self) -> TaskFilter:
        """Return this filter; raise ``SearchError`` with its first fault."""
        for name, faults in self.errors.items() if self.is_bound else ():
            raise SearchError(str(self.data.get(name, "")), str(faults[0]).partition(": ")[2] or str(faults[0]))
        return self


def _field_of(qualifier: Qualifier) -> Any:
    return django_filters.CharFilter(label=qualifier.name, help_text=qualifier.help)


TaskFilter.declared_filters.update({name: _field_of(qualifier) for name, qualifier in QUALIFIERS.items()})
TaskFilter.base_filters = TaskFilter.get_filters()
