"""The view that receives."""

from django.urls import path

from django_dbtaskqueue.contrib.bridge import receive

urlpatterns = [path("bridge/<str:source>/", receive)]
