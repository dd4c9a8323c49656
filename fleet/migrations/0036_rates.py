"""What operators state of machines belongs to the fleet, whose planners use it, too. Its rows come with
traffic.0020."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0035_autoscaling")]
    operations = [
        migrations.CreateModel(
            name="Rate",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "kind",
                    models.CharField(
                        choices=[
                            ("machine_price", "machine_price"), ("machine_watts", "machine_watts"),
                            ("grid_intensity", "grid_intensity"), ("pue", "pue"),
                        ],
                        max_length=16,
                    ),
                ),
                ("subject", models.CharField(max_length=64)),
                ("region", models.CharField(blank=True, max_length=64)),
                ("value", models.DecimalField(decimal_places=6, max_digits=16)),
                ("valid_from", models.DateTimeField()),
                ("actor", models.CharField(max_length=64)),
                ("created_at", models.DateTimeField()),
            ],
            options={"ordering": ["-valid_from", "-id"]},
        ),
        migrations.AddConstraint(
            model_name="rate",
            constraint=models.UniqueConstraint(
                fields=("kind", "subject", "region", "valid_from"), name="fleet_rate_once"
            ),
        ),
    ]  # fmt: skip
