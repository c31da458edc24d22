"""The addresses of a site as the page about the JSON API makes it."""

from django.urls import include, path

urlpatterns = [path("taskqueue/api/", include("django_dbtaskqueue.api.urls"))]
