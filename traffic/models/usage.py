"""What tenants and their keys used, by the hour, and how far each source has been counted."""

from django.db import models


class UsageHour(models.Model):
    """One hour of one tenant. With a `key`: as the ingresses counted its requests. Without: as the cells counted the
    tenant's requests and tokens. The two overlap and are never added up."""

    tenant = models.CharField(max_length=64)
    key = models.CharField(max_length=16, blank=True)
    hour = models.DateTimeField()
    requests = models.PositiveBigIntegerField(default=0)
    limited = models.PositiveBigIntegerField(default=0)
    errors = models.PositiveBigIntegerField(default=0)
    prompt_tokens = models.PositiveBigIntegerField(default=0)
    completion_tokens = models.PositiveBigIntegerField(default=0)

    class Meta:
        ordering = ["-hour", "tenant", "key"]
        indexes = [models.Index(fields=["key", "hour"], name="usage_of_key")]
        constraints = [models.UniqueConstraint(fields=["tenant", "key", "hour"], name="usage_hour_once")]

    def __str__(self) -> str:
        return f"{self.tenant} {self.key} at {self.hour:%Y-%m-%d %H}"


class UsageMark(models.Model):
    """The totals of one subject that a source last told. `since` tells the life of the source that they belong to:
    totals of another life begin at 0."""

    source = models.CharField(max_length=96)
    subject = models.CharField(max_length=80)
    since = models.CharField(max_length=40)
    totals = models.JSONField()
    at = models.DateTimeField(db_index=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["source", "subject"], name="usage_mark_once")]

    def __str__(self) -> str:
        return f"{self.subject} by {self.source}"
