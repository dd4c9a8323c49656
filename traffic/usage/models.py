"""Tables of usage and costs: counters by hour, sums by day, marks of counted totals, exports, machine hours with cost,
energy and emissions, token weights, and budgets."""

from datetime import date
from decimal import Decimal
from typing import Any

from django.db import models
from django.db.models import Q

from fleet.capacity.planning.rates import Source
from traffic.usage.planning.counting import DEFAULT_ALERT_AT, BudgetRules, BudgetStanding, BudgetUnit
from traffic.usage.planning.prices import Kind, TokenWeights, WorkSums

COUNTS = (
    "arrived", "limited", "failed", "refused", "requests", "errors", "cancelled", "estimated", "prompt_tokens",
    "cached_tokens", "completion_tokens",
)  # fmt: skip
"""Counter columns in display order."""
AMOUNTS = ("charged", "machine_cost")
"""Columns in US dollars."""


class UsageCounts(models.Model):
    """Usage of one tenant, key, deployment, class and adapter in a time. Rows are disjoint, so any may be summed. An
    empty key means requests without one; an empty adapter the base model; an empty deployment what ingresses counted of
    a key before the deployment was known.

    - Ingresses count `arrived`, with `limited` (over a limit) and `failed` (5xx) as parts. By deployment, they count
      `refused`: failed requests that no cell counts.
    - Cells count admitted `requests`, with `errors`, `cancelled` and `estimated` (no token counts from the engine) as
      parts. Ingresses add `errors` of streams that no cell continued. `cached_tokens` are a part of `prompt_tokens`.
    - `charged` is the price of the tokens when they were counted; `machine_cost` is the share of the cells' cost, once
      the hour is settled. Both are in US dollars."""

    tenant = models.CharField(max_length=64, blank=True)
    key = models.CharField(max_length=16, blank=True)
    deployment = models.CharField(max_length=96, blank=True)
    serving_class = models.CharField(max_length=16, blank=True)
    adapter = models.CharField(max_length=64, blank=True)
    arrived = models.PositiveBigIntegerField(default=0)
    limited = models.PositiveBigIntegerField(default=0)
    failed = models.PositiveBigIntegerField(default=0)
    refused = models.PositiveBigIntegerField(default=0)
    requests = models.PositiveBigIntegerField(default=0)
    errors = models.PositiveBigIntegerField(default=0)
    cancelled = models.PositiveBigIntegerField(default=0)
    estimated = models.PositiveBigIntegerField(default=0)
    prompt_tokens = models.PositiveBigIntegerField(default=0)
    cached_tokens = models.PositiveBigIntegerField(default=0)
    completion_tokens = models.PositiveBigIntegerField(default=0)
    charged = models.DecimalField(max_digits=32, decimal_places=12, default=Decimal(0))
    machine_cost = models.DecimalField(max_digits=20, decimal_places=6, default=Decimal(0))

    class Meta:
        abstract = True


ACCOUNT = ("tenant", "key", "deployment", "serving_class", "adapter")
"""Columns that identify a row, besides its time."""


class UsageHour(UsageCounts):
    """An hour. Kept for 90 days."""

    hour = models.DateTimeField()

    class Meta:
        ordering = ["-hour", *ACCOUNT]
        indexes = [
            models.Index(fields=["key", "hour"], name="usage_of_key"),
            models.Index(fields=["hour"], name="usage_by_hour"),
        ]
        constraints = [models.UniqueConstraint(fields=[*ACCOUNT, "hour"], name="usage_hour_once")]

    def __str__(self) -> str:
        return f"{self.tenant} {self.key} of {self.deployment} at {self.hour:%Y-%m-%d %H}"


class UsageDay(UsageCounts):
    """The sums of a day's hours, if `SummedDay` says so. Kept for 400 days."""

    day = models.DateField()

    class Meta:
        ordering = ["-day", *ACCOUNT]
        indexes = [models.Index(fields=["day"], name="usage_by_day")]
        constraints = [models.UniqueConstraint(fields=[*ACCOUNT, "day"], name="usage_day_once")]

    def __str__(self) -> str:
        return f"{self.tenant} {self.key} of {self.deployment} on {self.day}"


class SummedDay(models.Model):
    """A past day (UTC) with sums in `UsageDay`, `CellDay` and `CostShareDay`. They are `is_current` until one of its
    hours changes; then the hours are read until they are summed again. Without `has_hours`, the hours of accounts are
    no longer kept and their sums are final."""

    day = models.DateField(primary_key=True)
    is_current = models.BooleanField()
    has_hours = models.BooleanField(default=True)

    def __str__(self) -> str:
        return f"sums of {self.day}"


class UsageMonth(models.Model):
    """A tenant's usage in a month (first day, UTC), written with the hours and compared with budgets."""

    tenant = models.CharField(max_length=64)
    month = models.DateField()
    tokens = models.PositiveBigIntegerField(default=0)
    charged = models.DecimalField(max_digits=32, decimal_places=12, default=Decimal(0))

    class Meta:
        constraints = [models.UniqueConstraint(fields=["tenant", "month"], name="usage_month_once")]

    def __str__(self) -> str:
        return f"{self.tenant} in {self.month:%Y-%m}"


class UsageMark(models.Model):
    """Last totals that a source reported of a subject in one of its lives, identified by `since`. Another life starts
    at 0."""

    source = models.CharField(max_length=96)
    subject = models.CharField(max_length=160)
    since = models.CharField(max_length=40)
    totals = models.JSONField()
    at = models.DateTimeField(db_index=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["source", "subject", "since"], name="usage_mark_of_life")]

    def __str__(self) -> str:
        return f"{self.subject} by {self.source}"


class UsageExport(models.Model):
    """A day that was exported to the bucket. Its object is named by the day and never changes."""

    target = models.CharField(max_length=500)
    name = models.CharField(max_length=64)
    day = models.DateField()
    sha256 = models.CharField(max_length=64)
    at = models.DateTimeField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["target", "name"], name="usage_export_once")]

    def __str__(self) -> str:
        return f"{self.name} in {self.target}"


SOURCES = [(source.value, source.label) for source in Source]
KIND = ("deployment", "version", "region", "instance_type")
ACCOUNT_OF_SHARE = ("tenant", "key", "serving_class", "adapter")


def _whole_field() -> "models.DecimalField[int, Decimal]":
    return models.DecimalField(max_digits=30, decimal_places=0, default=Decimal(0))


def _money_field() -> "models.DecimalField[Decimal, Decimal]":
    return models.DecimalField(max_digits=20, decimal_places=6, default=Decimal(0))


def _source_field() -> "models.PositiveSmallIntegerField[int, int]":
    return models.PositiveSmallIntegerField(choices=SOURCES, default=Source.MEASURED.value)


class KindOfMachines(models.Model):
    deployment = models.CharField(max_length=96, blank=True)
    version = models.CharField(max_length=160, blank=True)
    region = models.CharField(max_length=64, blank=True)
    instance_type = models.CharField(max_length=64)

    class Meta:
        abstract = True

    def kind(self) -> Kind:
        return Kind(self.deployment, self.version, self.region, self.instance_type)


class CellHour(KindOfMachines):
    """Time, cost and energy of machines of one kind in cells, within an hour.

    - `machine_ms` is the sum over machines; `busy_ms` the part with requests in flight. `spent` and `busy_spent` are
      these, each millisecond multiplied by its machine's hourly price in millionths of a dollar.
    - Energy is in microjoules by source; `busy_uj` is the part in busy time. `unrated_ms` has no known power. `refused`
      counts implausible meter readings.
    - Known once `settled`: `cost` and `idle` (its unattributed part) in US dollars, emissions in micrograms of CO2
      equivalent, and the source of each. Without a deployment: spares, all idle."""

    hour = models.DateTimeField()
    machine_ms = models.PositiveBigIntegerField(default=0)
    busy_ms = models.PositiveBigIntegerField(default=0)
    spent = _whole_field()
    busy_spent = _whole_field()
    measured_uj = models.PositiveBigIntegerField(default=0)
    rated_uj = models.PositiveBigIntegerField(default=0)
    estimated_uj = models.PositiveBigIntegerField(default=0)
    busy_uj = models.PositiveBigIntegerField(default=0)
    unrated_ms = models.PositiveBigIntegerField(default=0)
    refused = models.PositiveBigIntegerField(default=0)
    cost = _money_field()
    idle = _money_field()
    energy_uj = models.PositiveBigIntegerField(default=0)
    idle_uj = models.PositiveBigIntegerField(default=0)
    carbon_ug = models.PositiveBigIntegerField(default=0)
    idle_carbon_ug = models.PositiveBigIntegerField(default=0)
    cost_source = _source_field()
    energy_source = _source_field()
    carbon_source = _source_field()
    weights_source = _source_field()
    settled = models.BooleanField(default=False)

    class Meta:
        ordering = ["-hour", *KIND]
        indexes = [models.Index(fields=["hour"], name="cell_hour_open", condition=models.Q(settled=False))]
        constraints = [models.UniqueConstraint(fields=["hour", *KIND], name="cell_hour_once")]

    def __str__(self) -> str:
        return f"{self.deployment} on {self.instance_type} at {self.hour:%Y-%m-%d %H}"


class CellDay(KindOfMachines):
    """The sums of a day's settled hours, if `SummedDay` says so; see `CellHour`."""

    day = models.DateField()
    machine_ms = models.PositiveBigIntegerField(default=0)
    measured_uj = models.PositiveBigIntegerField(default=0)
    refused = models.PositiveBigIntegerField(default=0)
    cost = _money_field()
    idle = _money_field()
    energy_uj = models.PositiveBigIntegerField(default=0)
    idle_uj = models.PositiveBigIntegerField(default=0)
    carbon_ug = models.PositiveBigIntegerField(default=0)
    idle_carbon_ug = models.PositiveBigIntegerField(default=0)
    cost_source = _source_field()
    energy_source = _source_field()
    carbon_source = _source_field()

    class Meta:
        ordering = ["-day", *KIND]
        constraints = [models.UniqueConstraint(fields=["day", *KIND], name="cell_day_once")]

    def __str__(self) -> str:
        return f"{self.deployment} on {self.instance_type} on {self.day}"


class ShareOfMachines(KindOfMachines):
    """Usage of one tenant, key, class and adapter on one kind of machines, with its share of their cost, energy and
    emissions once settled. Tokens are those of the usage in the same time, by machines."""

    tenant = models.CharField(max_length=64, blank=True)
    key = models.CharField(max_length=16, blank=True)
    serving_class = models.CharField(max_length=16, blank=True)
    adapter = models.CharField(max_length=64, blank=True)
    prompt_tokens = models.PositiveBigIntegerField(default=0)
    cached_tokens = models.PositiveBigIntegerField(default=0)
    completion_tokens = models.PositiveBigIntegerField(default=0)
    cost = _money_field()
    energy_uj = models.PositiveBigIntegerField(default=0)
    carbon_ug = models.PositiveBigIntegerField(default=0)
    cost_source = _source_field()
    energy_source = _source_field()
    carbon_source = _source_field()

    class Meta:
        abstract = True


class CostShare(ShareOfMachines):
    """An hour. Kept for 90 days."""

    hour = models.DateTimeField()

    class Meta:
        ordering = ["-hour", *KIND, *ACCOUNT_OF_SHARE]
        indexes = [models.Index(fields=["hour"], name="cost_share_by_hour")]
        constraints = [
            models.UniqueConstraint(fields=["hour", *KIND, *ACCOUNT_OF_SHARE], name="cost_share_once"),
        ]

    def __str__(self) -> str:
        return f"{self.tenant} {self.key} on {self.instance_type} at {self.hour:%Y-%m-%d %H}"


class CostShareDay(ShareOfMachines):
    """The sums of a day's hours, if `SummedDay` says so. Kept for 400 days."""

    day = models.DateField()

    class Meta:
        ordering = ["-day", *KIND, *ACCOUNT_OF_SHARE]
        constraints = [
            models.UniqueConstraint(fields=["day", *KIND, *ACCOUNT_OF_SHARE], name="cost_share_day_once"),
        ]

    def __str__(self) -> str:
        return f"{self.tenant} {self.key} on {self.instance_type} on {self.day}"


def _no_sums() -> dict[str, Any]:
    return {"products": list(WorkSums().products), "targets": list(WorkSums().targets)}


class TokenWork(models.Model):
    """Sums of a node's measured work on a day (UTC); see `WorkSums`. Days of deleted nodes stay."""

    version = models.CharField(max_length=160)
    instance_type = models.CharField(max_length=64)
    node = models.CharField(max_length=64)
    day = models.DateField()
    samples = models.PositiveIntegerField(default=0)
    sums = models.JSONField(default=_no_sums)
    square = models.FloatField(default=0)
    steps = models.PositiveBigIntegerField(default=0)
    completion_tokens = models.PositiveBigIntegerField(default=0)

    class Meta:
        ordering = ["-day", "version", "instance_type", "node"]
        constraints = [
            models.UniqueConstraint(fields=["version", "instance_type", "node", "day"], name="token_work_once"),
        ]

    def __str__(self) -> str:
        return f"work of {self.node} for {self.version} on {self.day}"

    def work(self) -> WorkSums:
        return WorkSums(
            self.samples, tuple(self.sums["products"]), tuple(self.sums["targets"]), self.square, self.steps,
            self.completion_tokens,
        )  # fmt: skip

    def take(self, work: WorkSums) -> None:
        self.samples, self.square = work.samples, work.square
        self.sums = {"products": list(work.products), "targets": list(work.targets)}
        self.steps, self.completion_tokens = work.steps, work.completion_tokens


class TokenFit(models.Model):
    """Measured token weights of a version on an instance type; see `FittedWeights`. Microseconds of engine time; errors
    as shares."""

    version = models.CharField(max_length=160)
    instance_type = models.CharField(max_length=64)
    prompt = models.PositiveBigIntegerField()
    cached = models.PositiveBigIntegerField()
    completion = models.PositiveBigIntegerField()
    step_us = models.FloatField()
    sequence_us = models.FloatField()
    prompt_us = models.FloatField()
    cached_us = models.FloatField()
    sequences = models.FloatField()
    samples = models.PositiveBigIntegerField()
    nodes = models.PositiveIntegerField()
    error = models.FloatField()
    weight_error = models.FloatField()
    bounded = models.BooleanField(default=False)
    fitted_at = models.DateTimeField()

    class Meta:
        ordering = ["version", "instance_type"]
        constraints = [models.UniqueConstraint(fields=["version", "instance_type"], name="token_fit_once")]

    def __str__(self) -> str:
        return f"tokens of {self.version} on {self.instance_type}"

    def weights(self) -> TokenWeights:
        return TokenWeights(self.prompt, self.cached, self.completion)


def default_alert_at() -> list[int]:
    return list(DEFAULT_ALERT_AT)


class Budget(models.Model):
    """A monthly (UTC) limit on the usage of a tenant or of one key, or on the cost of a deployment's machines; with
    none of them, on all machines including spares. US dollars of a tenant or key are charges for tokens, those of
    machines their cost. `key`: the first of a key's rotations; all keys that replaced it share the limit. `month`,
    `level` and `stopped` are the last announced state. `stopped`: the key, or all keys of the tenant, are refused."""

    tenant = models.CharField(max_length=64, blank=True)
    key = models.CharField(max_length=16, blank=True)
    deployment = models.CharField(max_length=96, blank=True)
    unit = models.CharField(max_length=8, choices=[(unit.value, unit.value) for unit in BudgetUnit])
    limit = models.DecimalField(max_digits=22, decimal_places=6)
    alert_at = models.JSONField(default=default_alert_at)
    hard_stop = models.BooleanField(default=False)
    actor = models.CharField(max_length=64)
    changed_at = models.DateTimeField()
    month = models.DateField(default=date(2000, 1, 1))
    level = models.PositiveIntegerField(default=0)
    stopped = models.BooleanField(default=False)
    stopped_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["tenant", "key", "deployment", "unit"]
        indexes = [models.Index(fields=["tenant"], name="budget_stopped", condition=Q(stopped=True))]
        constraints = [
            models.UniqueConstraint(fields=["tenant", "key", "deployment", "unit"], name="budget_once"),
            models.CheckConstraint(
                condition=Q(tenant="", key="") | Q(tenant="", deployment="") | Q(key="", deployment=""),
                name="budget_of_one",
            ),
            models.CheckConstraint(
                condition=~Q(tenant="") | ~Q(key="") | Q(unit=BudgetUnit.USD.value, hard_stop=False),
                name="budget_of_machines",
            ),
        ]

    def __str__(self) -> str:
        return f"budget of {self.subject}"

    @property
    def subject(self) -> str:
        if self.tenant:
            return f"tenant {self.tenant} ({self.unit})"
        if self.key:
            return f"key sw_{self.key} ({self.unit})"
        return f"machines of {self.deployment or 'the fleet'}"

    @property
    def is_of_machines(self) -> bool:
        return not (self.tenant or self.key)

    def rules(self) -> BudgetRules:
        return BudgetRules(BudgetUnit(self.unit), self.limit, tuple(self.alert_at), self.hard_stop)

    def standing(self) -> BudgetStanding:
        return BudgetStanding(self.month, self.level, self.stopped)
