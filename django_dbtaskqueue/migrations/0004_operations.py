"""The operator's tables."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("dbtaskqueue", "0003_ended")]

    operations = []
