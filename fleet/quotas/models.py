"""Table of quotas: the machines of a type that a team is entitled to, in a region or in total."""

from django.core.validators import MaxValueValidator, RegexValidator
from django.db import models

from fleet.regions.models import Region
from models_registry.instance_types.models import InstanceType

MACHINES_MOST = 100_000
"""Limit against typing errors; the largest planned fleets have a tenth of it."""
TEAM = r"^[A-Za-z0-9][-A-Za-z0-9_]*\Z"


class Quota(models.Model):
    """Machines of an instance type that a team is entitled to. Other teams with a quota of the type may borrow idle
    ones until the team needs them. A team without a quota of a type is not limited there."""

    name = models.CharField(max_length=200, primary_key=True, help_text="`TEAM:TYPE` or `TEAM:TYPE:REGION`.")
    team = models.SlugField(max_length=64, validators=[RegexValidator(TEAM)], help_text="As deployments name theirs.")
    instance_type = models.ForeignKey(InstanceType, on_delete=models.CASCADE, related_name="quotas")
    region = models.ForeignKey(
        Region,
        on_delete=models.CASCADE,
        null=True,
        blank=True,
        related_name="quotas",
        help_text="Empty or left out: over all regions, in addition to the quotas of each.",
    )
    machines = models.PositiveIntegerField(
        validators=[MaxValueValidator(MACHINES_MOST)], help_text="Machines that the team is entitled to."
    )
    borrow_most = models.PositiveIntegerField(
        null=True,
        blank=True,
        validators=[MaxValueValidator(MACHINES_MOST)],
        help_text="Maximum machines to borrow from other teams; null: unlimited.",
    )
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
    return f"{team}:{instance_type}:{region}" if region else f"{team}:{instance_type}"
