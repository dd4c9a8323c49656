"""What the planner of roles last saw and wanted of each place whose roles it plans."""

from django.db import models

from fleet.models.deployment import DeploymentRegion
from fleet.planning.role_split import RoleSplit
from fleet.planning.roles.ratio import RatioRule
from fleet.planning.states import choices


class RoleState(models.Model):
    """The last look at a deployment in a region. `mixed`, `prefill` and `decode`: cells that it wants of each role;
    `needed_…`: what the demand takes at least; None: unknown, or mixed is better. `carries` and `mixed_carries`:
    requests a second within both limits, so and all mixed. `from_tokens`: uncached tokens of a prompt from which its
    decode cells have it read elsewhere; null: the usual. `acting`: the cells follow; else it is what would be wanted.
    `figures`: what was seen, by name. `counted`: what was counted of its requests when it was looked at."""

    place = models.OneToOneField(
        DeploymentRegion, on_delete=models.CASCADE, related_name="role_state", primary_key=True
    )
    mixed = models.PositiveIntegerField()
    prefill = models.PositiveIntegerField()
    decode = models.PositiveIntegerField()
    needed_prefill = models.PositiveIntegerField(null=True)
    needed_decode = models.PositiveIntegerField(null=True)
    carries = models.FloatField(null=True)
    mixed_carries = models.FloatField(null=True)
    from_tokens = models.PositiveIntegerField(null=True)
    rule = models.CharField(max_length=16, choices=choices(RatioRule))
    reason = models.TextField()
    acting = models.BooleanField()
    figures = models.JSONField(default=dict)
    counted = models.JSONField(default=dict)
    looked_at = models.DateTimeField()

    class Meta:
        ordering = ["place_id"]

    def __str__(self) -> str:
        return f"{self.wanted} wanted at place {self.place_id}"

    @property
    def wanted(self) -> RoleSplit:
        return RoleSplit(self.mixed, self.prefill, self.decode)

    @property
    def needed(self) -> int | None:
        """Cells that the demand takes at least."""
        if self.needed_prefill is None or self.needed_decode is None:
            return None
        return self.needed_prefill + self.needed_decode
