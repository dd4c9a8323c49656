"""What operators state of prices of machines and tokens, of power and of the grid."""

from django.db import models

from fleet.planning.markets import Market
from fleet.planning.rate import Rate as RateInForce
from fleet.planning.rate import RateKind
from fleet.planning.states import choices


class Rate(models.Model):
    """What an operator states of prices, power and the grid, from `valid_from` on: see `RateKind`. Rows are never
    changed; one that is not in force yet may be withdrawn."""

    kind = models.CharField(max_length=16, choices=[(kind.value, kind.value) for kind in RateKind])
    subject = models.CharField(max_length=96)
    region = models.CharField(max_length=64, blank=True)
    market = models.CharField(max_length=16, choices=choices(Market), blank=True)
    value = models.DecimalField(max_digits=16, decimal_places=6)
    valid_from = models.DateTimeField()
    actor = models.CharField(max_length=64)
    created_at = models.DateTimeField()

    class Meta:
        ordering = ["-valid_from", "-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["kind", "subject", "region", "market", "valid_from"], name="fleet_rate_once"
            ),
        ]

    def __str__(self) -> str:
        where = f" in {self.region}" if self.region else ""
        bought = f", {self.market}," if self.market else ""
        return f"{self.kind} of {self.subject}{where}{bought} from {self.valid_from:%Y-%m-%d %H:%M}"

    def rate(self) -> RateInForce:
        return RateInForce(RateKind(self.kind), self.subject, self.region, self.value, self.valid_from, self.market)
