"""Migrations that a next release could bring: one that pollers do not notice, and one that stops them."""

HEAD = """\
from django.contrib.postgres.operations import AddConstraintNotValid, AddIndexConcurrently, ValidateConstraint
from django.db import migrations, models
from django.db.models import Q


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("dbtaskqueue", "LAST_MIGRATION")]
    operations = [
"""
SAFE = f"""{HEAD}
        migrations.AddField("task", "planted", models.IntegerField(null=True)),
        migrations.AddField("task", "planted_kind", models.CharField(max_length=20, db_default="plain")),
        AddIndexConcurrently("task", models.Index(fields=["planted"], condition=Q(status="ERROR"), name="planted_ix")),
        AddConstraintNotValid("task", models.CheckConstraint(condition=Q(planted__gte=0), name="planted_positive")),
        ValidateConstraint("task", name="planted_positive"),
    ]
"""
# An older poller does not fill the column when it settles.
STOPS_SETTLING = f"""{HEAD}
        migrations.AddField("task", "planted", models.IntegerField(null=True)),
        AddConstraintNotValid("task", models.CheckConstraint(
            condition=Q(finish_time=None) | Q(planted__isnull=False), name="planted_when_finished")),
    ]
"""
