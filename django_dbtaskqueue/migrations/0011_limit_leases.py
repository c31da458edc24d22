"""The leases of a limited queue as text, which a checkout reads and writes faster than JSON."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """Add columns with defaults. Pollers of the release before write ``running``, which makes others count anew."""

    dependencies = [("dbtaskqueue", "0010_steps")]

    operations = [
        migrations.AddField("QueueLimit", "leases", models.TextField("leases", blank=True, db_default="")),
        migrations.AddField("QueueLimit", "stamp", models.CharField("stamp", max_length=32, blank=True, db_default="")),
    ]
