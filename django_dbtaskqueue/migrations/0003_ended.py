"""What the pages and housekeeping look for: an end status and time that no checkout touches."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("dbtaskqueue", "0002_call_counts")]

    operations = []
