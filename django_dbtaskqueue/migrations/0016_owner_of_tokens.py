"""Whose each API token is. A token that was made before is refused from now on: make a new one."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """Add a column."""

    dependencies = [("dbtaskqueue", "0015_index_of_groups")]
    operations = [
        migrations.AddField("apitoken", "actor_id", models.CharField("actor id", max_length=200, db_default="")),
    ]
