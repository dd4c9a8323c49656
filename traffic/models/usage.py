"""What was used and what it cost: by the hour, later by the day; how far counting went; and exports."""

from decimal import Decimal

from django.db import models

COUNTS = (
    "arrived", "limited", "failed", "refused", "requests", "errors", "cancelled", "estimated", "prompt_tokens",
    "cached_tokens", "completion_tokens",
)  # fmt: skip
"""Columns of counts, in the order in which they are shown."""
AMOUNTS = ("charged", "machine_cost")
"""Columns of US dollars."""


class UsageCounts(models.Model):
    """What one tenant, key, deployment, class and adapter used in some time. Every row counts something else, so any
    may be added up. No key: requests without one. No adapter: the model itself. No deployment: what ingresses counted
    of a key before they knew it.

    Ingresses count `arrived`, of those `limited` (over a limit) and `failed` (answers of 5xx). By deployment, with and
    without a key, they count `refused`: requests that failed and that no cell counts. Cells count the others:
    `requests` that they admitted, of those `errors`, `cancelled` (cut short) and `estimated` (no engine told their
    tokens); `cached_tokens` are a part of `prompt_tokens`. `charged`: the price of the tokens when they were counted;
    `machine_cost`: the share of the cells' hours, once the hour is over. Both in US dollars.
    """

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
"""What a row is about, beside its time."""


class UsageHour(UsageCounts):
    """An hour. Kept for 90 days, then added to its day."""

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
    """A day whose hours are no longer kept; 400 days."""

    day = models.DateField()

    class Meta:
        ordering = ["-day", *ACCOUNT]
        indexes = [models.Index(fields=["day"], name="usage_by_day")]
        constraints = [models.UniqueConstraint(fields=[*ACCOUNT, "day"], name="usage_day_once")]

    def __str__(self) -> str:
        return f"{self.tenant} {self.key} of {self.deployment} on {self.day}"


class UsageMonth(models.Model):
    """What a tenant has used of a month (its first day, UTC), written with the hours: budgets are compared with it."""

    tenant = models.CharField(max_length=64)
    month = models.DateField()
    tokens = models.PositiveBigIntegerField(default=0)
    charged = models.DecimalField(max_digits=32, decimal_places=12, default=Decimal(0))

    class Meta:
        constraints = [models.UniqueConstraint(fields=["tenant", "month"], name="usage_month_once")]

    def __str__(self) -> str:
        return f"{self.tenant} in {self.month:%Y-%m}"


class UsageMark(models.Model):
    """The totals of one subject that a source last reported in one of its lives, which `since` names: totals of another
    life begin at 0."""

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
    """A day that is in the configured bucket, as one object; its name says the day, and its content never changes."""

    target = models.CharField(max_length=500)
    name = models.CharField(max_length=64)
    day = models.DateField()
    sha256 = models.CharField(max_length=64)
    at = models.DateTimeField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["target", "name"], name="usage_export_once")]

    def __str__(self) -> str:
        return f"{self.name} in {self.target}"
