"""Where each poller's latest large checkout ended."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("dbtaskqueue", "0001_initial")]

    operations = [
        migrations.AddField(
            "poller", "taken_queue", models.CharField("queue", max_length=200, blank=True, db_default="")
        ),
        migrations.AddField("poller", "taken_priority", models.SmallIntegerField("priority", null=True, blank=True)),
        migrations.AddField("poller", "taken_time", models.DateTimeField("ready time", null=True, blank=True)),
        migrations.AddField("poller", "taken_id", models.BigIntegerField("task", null=True, blank=True)),
    ]
