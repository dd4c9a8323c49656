"""The tables of regions, and of rates that operators set."""

from django.db import models

from engine_agent.protocol.states import PlainHttp
from fleet.capacity.planning.pools import Market
from fleet.capacity.planning.rates import Rate as RateInForce
from fleet.capacity.planning.rates import RateKind
from fleet.machines.planner import WarmSpares, parse_warm_spares
from fleet.reconcile.planning.states import choices


class Region(models.Model):
    """A failure and latency domain. `spares`: instance type -> idle nodes to keep warm (`WarmSpares`).

    `ingress_url`: for applications' requests; `plain_http`: clients served without TLS. `position` orders regions and
    selects local ports. `cheapest_first`: of equally suitable pools the cheapest is used first. `grpc`: its ingresses
    also serve gRPC. `alarms`: of CloudWatch (`fleet.clouds.planning.alarms.AlarmSource`)."""

    name = models.SlugField(max_length=64, primary_key=True)
    provider = models.CharField(max_length=32, default="local")
    position = models.PositiveIntegerField(default=0)
    ingress_url = models.URLField(blank=True)
    spares = models.JSONField(default=dict, blank=True)
    plain_http = models.CharField(max_length=16, choices=choices(PlainHttp), default=PlainHttp.SERVE.value)
    cheapest_first = models.BooleanField(default=False)
    grpc = models.BooleanField(default=False)
    alarms = models.JSONField(default=list, blank=True)

    class Meta:
        ordering = ["position", "name"]

    def __str__(self) -> str:
        return self.name

    def warm_spares(self) -> dict[str, WarmSpares]:
        """Instance type -> the idle nodes to keep, and the part for repairs."""
        return parse_warm_spares(self.spares)


class Rate(models.Model):
    """A price, power or grid value that an operator sets from `valid_from` on (`RateKind`). Rows never change; one that
    is not in force yet may be withdrawn."""

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
