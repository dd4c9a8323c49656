"""What machines cost, drew and emitted by the hour, and whose that is."""

from decimal import Decimal

from django.db import models

from fleet.planning.rate import Source
from traffic.planning.machine_cost import Kind

SOURCES = [(source.value, source.label) for source in Source]
KIND = ("deployment", "version", "region", "instance_type")
ACCOUNT_OF_SHARE = ("tenant", "key", "serving_class", "adapter")


def _whole() -> "models.DecimalField[int, Decimal]":
    return models.DecimalField(max_digits=30, decimal_places=0, default=Decimal(0))


def _money() -> "models.DecimalField[Decimal, Decimal]":
    return models.DecimalField(max_digits=20, decimal_places=6, default=Decimal(0))


def _source() -> "models.PositiveSmallIntegerField[int, int]":
    return models.PositiveSmallIntegerField(choices=SOURCES, default=Source.MEASURED.value)


class KindOfMachines(models.Model):
    deployment = models.CharField(max_length=96, blank=True)
    version = models.CharField(max_length=160, blank=True)
    region = models.CharField(max_length=64, blank=True)
    instance_type = models.CharField(max_length=64)
    hour = models.DateTimeField()

    class Meta:
        abstract = True

    def kind(self) -> Kind:
        return Kind(self.deployment, self.version, self.region, self.instance_type)


class CellHour(KindOfMachines):
    """How long machines of one kind were in cells within an hour, what that cost and what energy they took.

    `machine_ms`: milliseconds of all of them together, `busy_ms` those with requests in flight. `spent` and
    `busy_spent`: each of these milliseconds times what its machine costs an hour, in millionths of a dollar. Energy is
    in microjoules, by its source; `busy_uj` is the part of it that fell into busy time. `unrated_ms`: milliseconds of
    parts of machines of which nobody knows what they draw. `refused`: readings of meters that were not believed.

    The rest is known once the hour is `settled`: `cost` and `idle` (the part of it that is nobody's) in US dollars,
    emissions in micrograms of CO2 equivalent, and how well each is known. Without a deployment: spares, all idle.
    """

    machine_ms = models.PositiveBigIntegerField(default=0)
    busy_ms = models.PositiveBigIntegerField(default=0)
    spent = _whole()
    busy_spent = _whole()
    measured_uj = models.PositiveBigIntegerField(default=0)
    rated_uj = models.PositiveBigIntegerField(default=0)
    estimated_uj = models.PositiveBigIntegerField(default=0)
    busy_uj = models.PositiveBigIntegerField(default=0)
    unrated_ms = models.PositiveBigIntegerField(default=0)
    refused = models.PositiveBigIntegerField(default=0)
    cost = _money()
    idle = _money()
    energy_uj = models.PositiveBigIntegerField(default=0)
    idle_uj = models.PositiveBigIntegerField(default=0)
    carbon_ug = models.PositiveBigIntegerField(default=0)
    idle_carbon_ug = models.PositiveBigIntegerField(default=0)
    cost_source = _source()
    energy_source = _source()
    carbon_source = _source()
    weights_source = _source()
    settled = models.BooleanField(default=False)

    class Meta:
        ordering = ["-hour", *KIND]
        indexes = [models.Index(fields=["hour"], name="cell_hour_open", condition=models.Q(settled=False))]
        constraints = [models.UniqueConstraint(fields=["hour", *KIND], name="cell_hour_once")]

    def __str__(self) -> str:
        return f"{self.deployment} on {self.instance_type} at {self.hour:%Y-%m-%d %H}"


class CostShare(KindOfMachines):
    """What one tenant, key, class and adapter used on one kind of machines within an hour, and its share of what they
    cost, drew and emitted, once the hour is over. Its tokens are those of the hour of usage, by machines. After 90
    days the hours of a day are added to its first one."""

    tenant = models.CharField(max_length=64, blank=True)
    key = models.CharField(max_length=16, blank=True)
    serving_class = models.CharField(max_length=16, blank=True)
    adapter = models.CharField(max_length=64, blank=True)
    prompt_tokens = models.PositiveBigIntegerField(default=0)
    cached_tokens = models.PositiveBigIntegerField(default=0)
    completion_tokens = models.PositiveBigIntegerField(default=0)
    cost = _money()
    energy_uj = models.PositiveBigIntegerField(default=0)
    carbon_ug = models.PositiveBigIntegerField(default=0)
    cost_source = _source()
    energy_source = _source()
    carbon_source = _source()

    class Meta:
        ordering = ["-hour", *KIND, *ACCOUNT_OF_SHARE]
        indexes = [models.Index(fields=["hour"], name="cost_share_by_hour")]
        constraints = [
            models.UniqueConstraint(fields=["hour", *KIND, *ACCOUNT_OF_SHARE], name="cost_share_once"),
        ]

    def __str__(self) -> str:
        return f"{self.tenant} {self.key} on {self.instance_type} at {self.hour:%Y-%m-%d %H}"
