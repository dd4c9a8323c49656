"""Computes what breaks if a region is lost at the peak of the next day, after each round of forecasts, and stores it
for pages and the API."""

from dataclasses import asdict
from datetime import datetime

from django.db import transaction

from kernel import live
from traffic.region_shares.models import RegionLoss
from traffic.region_shares.planning.losses import plan_region_losses
from traffic.region_shares.selectors.expected_load import expected_load


def region_losses_store(*, now: datetime) -> int:
    """Replaces all rows. Returns the number of regions with a shortage. Without recent forecasts there are no rows."""
    expected = expected_load(now)
    found = plan_region_losses(expected.deployments, expected.latency_ms)
    losses = [
        RegionLoss(
            region_id=region,
            made_at=now,
            deployments=len(expected.deployments),
            is_judged=expected.is_judged,
            shortages=[asdict(row) | {"at": row.at.isoformat()} for row in rows],
        )
        for region, rows in sorted(found.items())
    ]
    with transaction.atomic():
        RegionLoss.objects.exclude(region__in=found).delete()
        RegionLoss.objects.bulk_create(
            losses,
            update_conflicts=True,  # two controllers may finish a round at the same time
            unique_fields=["region"],
            update_fields=["made_at", "deployments", "is_judged", "shortages"],
        )
    live.push("regions")
    return sum(bool(rows) for rows in found.values())
