"""The passenger's pages."""

from __future__ import annotations

from django.urls import path

from example_project.flights import views

app_name = "flights"
urlpatterns = [
    path("", views.home, name="home"),
    path("claims/new/", views.new_claim, name="new_claim"),
    path("claims/<slug:reference>/", views.claim, name="claim"),
]
