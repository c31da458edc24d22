"""Filing the claims: most in bulk, some one by one as the web page does, and some that roll back on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from django.db import transaction
from django.db.models import QuerySet

from django_dbtaskqueue.models import Task, TaskHistory
from example_project.flights.desk import QUEUE, file_claim, file_claims
from example_project.flights.models import Filing, Flight

if TYPE_CHECKING:
    from example_project.flights.demo.pipeline import Engineer

CHUNK = 2_000
PASSENGER = "Demo passenger"


class ChangedMind(Exception):
    """The passenger withdraws before the claim is committed."""


def file_each(references: Sequence[str]) -> None:
    """File claims one by one, each in its own transaction, with the function behind the web page."""
    for flight in _unfiled(references):
        file_claim(flight, PASSENGER)


def file_in_bulk(references: Sequence[str], progress: Callable[[int], None]) -> None:
    """File claims in chunks, each chunk in one transaction; what an earlier run filed is left alone."""
    done = 0
    for chunk in _chunks(references):
        file_claims(list(_unfiled(chunk)), PASSENGER)
        progress(done := done + len(chunk))


def unfiled(references: Sequence[str]) -> list[str]:
    """Return the references of flights without a filing, in their order."""
    missing = {name for chunk in _chunks(references) for name in _unfiled(chunk).values_list("reference", flat=True)}
    return [reference for reference in references if reference in missing]


def file_by_pipeline(references: Sequence[str], engineer: Engineer, progress: Callable[[int], None]) -> None:
    """Have the pipeline enqueue the claims it chose, those for ``references``, all in one transaction.

    Spark knows nothing of filings: they are written after its transaction. A run that ends in between leaves claims in
    the queue that the next run passes over, and files.
    """
    if references:
        engineer.enqueue()
    done = 0
    for chunk in _chunks(references):
        Filing.objects.bulk_create(Filing(flight=flight, passenger=PASSENGER) for flight in _unfiled(chunk))
        progress(done := done + len(chunk))


def _chunks(references: Sequence[str]) -> Iterator[Sequence[str]]:
    return (references[start : start + CHUNK] for start in range(0, len(references), CHUNK))


def withdraw(references: Sequence[str]) -> int:
    """File claims whose transactions roll back after the task was enqueued; return how many did."""
    withdrawn = 0
    for flight in _unfiled(references):
        with suppress(ChangedMind), transaction.atomic():
            file_claim(flight, PASSENGER)
            withdrawn += 1
            raise ChangedMind
    return withdrawn


def still_present(references: Sequence[str]) -> int:
    """Count the tasks, finished ones included, of flights that nobody ever filed a claim for. It must be 0."""
    filed = Filing.objects.filter(flight__reference__in=references).values_list("flight__reference", flat=True)
    never_filed = set(references) - set(filed)
    return sum(model.objects.filter(queue=QUEUE, reference__in=never_filed).count() for model in (Task, TaskHistory))


def _unfiled(references: Sequence[str]) -> QuerySet[Flight]:
    return Flight.objects.filter(reference__in=references, filing=None).order_by("id")
