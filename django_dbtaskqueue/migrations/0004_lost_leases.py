"""Count the leases in a row that ran out: a task that may have killed its process runs apart from the others.

A poller of the release before works on: the column has a default in the database, and no statement of it names it.
"""

from django.db import migrations, models


class Migration(migrations.Migration):
    """Add a column with a default, which rewrites no row."""

    dependencies = [("dbtaskqueue", "0003_api_token")]

    operations = [
        migrations.AddField(model, "lost_leases", models.IntegerField("leases lost in a row", db_default=0))
        for model in ("task", "temporarytask")
    ]
