"""Routes of the JSON API: ``path("taskqueue/api/", include("django_dbtaskqueue.operations.urls"))``."""

from __future__ import annotations

from django.urls import path

from django_dbtaskqueue.operations import api

app_name = "dbtaskqueue_api"
urlpatterns = [
    path("tasks", api.tasks, name="tasks"),
    path("tasks/count", api.count, name="count"),
    path("tasks/<int:pk>", api.task, name="task"),
    path("tasks/<str:verb>/ids", api.on_ids, name="on_ids"),
    path("tasks/<str:verb>/preview", api.preview, name="preview"),
    path("tasks/<str:verb>/search", api.on_search, name="on_search"),
    path("operations/<int:pk>", api.operation, name="operation"),
    path("operations/<int:pk>/cancel", api.cancel, name="cancel"),
    path("queues", api.queues, name="queues"),
    path("queues/<path:queue>/pause", api.pause, name="pause"),
    path("queues/<path:queue>/start", api.start, name="start"),
    path("queues/<path:queue>/purge", api.purge, name="purge"),
]
