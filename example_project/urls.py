"""The admin, and the flight desk at the top."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path

urlpatterns = [path("admin/", admin.site.urls), path("", include("example_project.flights.urls"))]
