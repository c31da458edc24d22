"""The desk's tables."""

from __future__ import annotations

import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Airline",
            fields=[
                ("code", models.CharField(max_length=2, primary_key=True, serialize=False)),
                ("name", models.CharField(max_length=100)),
            ],
        ),
        migrations.CreateModel(
            name="Flight",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("reference", models.CharField(max_length=40)),
                ("number", models.PositiveSmallIntegerField()),
                ("origin", models.CharField(max_length=3)),
                ("destination", models.CharField(max_length=3)),
                ("flown_on", models.DateField()),
                ("scheduled_departure", models.DateTimeField()),
                (
                    "departure_delay",
                    models.SmallIntegerField(blank=True, help_text="Minutes. Empty: never departed.", null=True),
                ),
                (
                    "arrival_delay",
                    models.SmallIntegerField(blank=True, help_text="Minutes. Empty: not on record.", null=True),
                ),
                ("distance_miles", models.PositiveSmallIntegerField()),
                (
                    "airline",
                    models.ForeignKey(
                        db_index=False, on_delete=django.db.models.deletion.PROTECT, to="flights.airline"
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="Plane",
            fields=[
                ("tail_number", models.CharField(max_length=10, primary_key=True, serialize=False)),
                ("model", models.CharField(max_length=100)),
                ("seats", models.PositiveSmallIntegerField()),
            ],
        ),
        migrations.CreateModel(
            name="Claim",
            fields=[
                (
                    "flight",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.PROTECT,
                        primary_key=True,
                        serialize=False,
                        to="flights.flight",
                    ),
                ),
                (
                    "decision",
                    models.CharField(
                        choices=[
                            ("paid", "Compensation is due"),
                            ("not_late", "Less than three hours late: nothing is due"),
                            ("exempt", "Aircraft of fewer than 30 seats: exempt"),
                        ],
                        max_length=20,
                    ),
                ),
                ("distance_km", models.PositiveIntegerField()),
                ("compensation", models.PositiveIntegerField(help_text="Whole US dollars.")),
                ("decided_at", models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
            ],
        ),
        migrations.CreateModel(
            name="Filing",
            fields=[
                (
                    "flight",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.PROTECT,
                        primary_key=True,
                        serialize=False,
                        to="flights.flight",
                    ),
                ),
                ("passenger", models.CharField(max_length=100)),
                ("filed_at", models.DateTimeField(auto_now_add=True)),
            ],
        ),
        migrations.AddField(
            model_name="flight",
            name="plane",
            field=models.ForeignKey(
                blank=True,
                db_column="tail_number",
                db_constraint=False,
                db_index=False,
                null=True,
                on_delete=django.db.models.deletion.DO_NOTHING,
                to="flights.plane",
            ),
        ),
        migrations.AddConstraint(
            model_name="flight", constraint=models.UniqueConstraint(fields=("reference",), name="flight_reference")
        ),
    ]
