"""Quotas: how many machines of a type a team is entitled to, over all regions."""

from django.db import models

from fleet.models.region import InstanceType


class Quota(models.Model):
    """Machines of an instance type that a team may count on. What it leaves idle the other teams with a quota of the
    type may borrow, and give back once it wants them. `borrow_most`: so many machines of others it may borrow at most;
    None: any number. Whoever has no quota of a type is bound by none there. `name`: `TEAM:TYPE`, for addresses."""

    name = models.CharField(max_length=130, primary_key=True)
    team = models.SlugField(max_length=64)
    instance_type = models.ForeignKey(InstanceType, on_delete=models.CASCADE, related_name="quotas")
    machines = models.PositiveIntegerField()
    borrow_most = models.PositiveIntegerField(null=True, blank=True)
    changed_by = models.CharField(max_length=64)
    changed_at = models.DateTimeField()

    class Meta:
        ordering = ["instance_type_id", "team"]
        constraints = [models.UniqueConstraint(fields=["team", "instance_type"], name="quota_once_per_team_and_type")]

    def __str__(self) -> str:
        return f"{self.team}: {self.machines} {self.instance_type_id}"


def quota_name(team: str, instance_type: str) -> str:
    """What the quota of a team and a type is called."""
    return f"{team}:{instance_type}"
