"""The column of the next release."""

from django.db import models

from django_dbtaskqueue.models import Task

Task.add_to_class("planted", models.IntegerField(null=True))
