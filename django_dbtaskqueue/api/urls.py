"""Routes of the JSON API: ``path("taskqueue/api/", include("django_dbtaskqueue.api.urls"))``."""

from __future__ import annotations

from django.urls import path

from django_dbtaskqueue.api import views

app_name = "dbtaskqueue_api"
urlpatterns = [
    path("tasks", views.tasks, name="tasks"),
    path("tasks/count", views.count, name="count"),
    path("tasks/<int:pk>", views.task, name="task"),
    path("tasks/<str:verb>/ids", views.on_ids, name="on_ids"),
    path("tasks/<str:verb>/preview", views.preview, name="preview"),
    path("tasks/<str:verb>/search", views.on_search, name="on_search"),
    path("operations/<int:pk>", views.operation, name="operation"),
    path("operations/<int:pk>/cancel", views.cancel, name="cancel"),
    path("queues", views.queues, name="queues"),
    path("queues/<path:queue>/pause", views.pause, name="pause"),
    path("queues/<path:queue>/start", views.start, name="start"),
    path("queues/<path:queue>/purge", views.purge, name="purge"),
]
