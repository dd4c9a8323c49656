"""Quotas: how many machines of a type a team is entitled to, in a region or over all of them."""

from django.db import models

from fleet.regions.models import InstanceType, Region


class Quota(models.Model):
    """Machines of an instance type that a team may count on. What it leaves idle the other teams with a quota of the
    type may borrow, and give back once it wants them. `borrow_most`: so many machines of others it may borrow at most;
    None: any number. Whoever has no quota of a type is bound by none there. `region`: where; None: over all regions,
    beside those of each. `name`: `TEAM:TYPE` or `TEAM:TYPE:REGION`, for addresses."""

    name = models.CharField(max_length=200, primary_key=True)
    team = models.SlugField(max_length=64)
    instance_type = models.ForeignKey(InstanceType, on_delete=models.CASCADE, related_name="quotas")
    region = models.ForeignKey(Region, on_delete=models.CASCADE, null=True, blank=True, related_name="quotas")
    machines = models.PositiveIntegerField()
    borrow_most = models.PositiveIntegerField(null=True, blank=True)
    changed_by = models.CharField(max_length=64)
    changed_at = models.DateTimeField()

    class Meta:
        ordering = ["instance_type_id", "team", "name"]
        constraints = [
            models.UniqueConstraint(
                fields=["team", "instance_type", "region"], nulls_distinct=False, name="quota_once_per_team_type_region"
            )
        ]

    def __str__(self) -> str:
        return (
            f"{self.team}: {self.machines} {self.instance_type_id}{f' in {self.region_id}' if self.region_id else ''}"
        )


def quota_name(team: str, instance_type: str, region: str = "") -> str:
    """What the quota of a team and a type is called, in a region or over all."""
    return f"{team}:{instance_type}:{region}" if region else f"{team}:{instance_type}"
