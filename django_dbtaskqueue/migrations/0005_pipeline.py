"""The pipeline's tables."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("dbtaskqueue", "0004_operations")]

    operations = []
