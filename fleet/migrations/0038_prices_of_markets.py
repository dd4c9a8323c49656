"""A rate may be of one market, and a region may try its cheapest pool first."""

from django.db import migrations, models

MARKETS = ["reserved", "block", "open", "on_demand", "interruptible", "spot"]


class Migration(migrations.Migration):
    dependencies = [
        ("fleet", "0037_shares_and_quotas"),
        ("traffic", "0020_rates_to_fleet"),  # which fills rows without a market
    ]
    operations = [
        migrations.AddField("region", "cheapest_first", models.BooleanField(default=False)),
        migrations.AddField(
            "rate",
            "market",
            models.CharField(blank=True, choices=[(one, one.replace("_", " ").capitalize()) for one in MARKETS], default="", max_length=16),
            preserve_default=False,
        ),
        migrations.RemoveConstraint("rate", "fleet_rate_once"),
        migrations.AddConstraint(
            "rate",
            models.UniqueConstraint(
                fields=("kind", "subject", "region", "market", "valid_from"), name="fleet_rate_once"
            ),
        ),
    ]  # fmt: skip
