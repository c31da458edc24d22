"""The passenger's pages: home, the form, and how far a claim is."""

from __future__ import annotations

from django.db import IntegrityError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_GET, require_http_methods

from django_dbtaskqueue.models import Task, TaskHistory
from example_project.flights.desk import QUEUE, file_claim
from example_project.flights.forms import ClaimForm
from example_project.flights.models import Claim, Filing


@require_GET
def home(request: HttpRequest) -> HttpResponse:
    """Show the ways on from here."""
    return render(request, "flights/home.html")


@require_http_methods(["GET", "POST"])
def new_claim(request: HttpRequest) -> HttpResponse:
    """File a claim. The filing and its task are written in one transaction, see ``desk.file_claim``."""
    form = ClaimForm(request.POST) if request.method == "POST" else ClaimForm(initial=request.GET.dict())
    if form.is_bound and form.is_valid():
        try:
            return redirect(file_claim(form.flight, form.cleaned_data["passenger"]))
        except IntegrityError:  # somebody else filed it since the form looked
            form.refuse_duplicate()
    return render(request, "flights/new_claim.html", {"form": form}, status=400 if form.errors else 200)


@require_GET
def claim(request: HttpRequest, reference: str) -> HttpResponse:
    """Show a filing, its task's status, and the decision once there is one."""
    filing = get_object_or_404(Filing.objects.select_related("flight__airline"), flight__reference=reference)
    tasks = {"queue": QUEUE, "reference": reference}
    context = {
        "filing": filing,
        "task": Task.objects.filter(**tasks).first() or TaskHistory.objects.filter(**tasks).first(),
        "claim": Claim.objects.filter(flight=filing.flight_id).first(),
    }
    return render(request, "flights/claim.html", context)
