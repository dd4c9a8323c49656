"""Measured demand by series and slot, its forecasts, and their errors."""

from django.contrib.postgres.fields import ArrayField
from django.db import models

from fleet.capacity.planning.forecast_series import SeriesKey
from fleet.deployments.models import Deployment
from fleet.regions.models import Region


class Series(models.Model):
    """Demand for a deployment from one origin region in one serving class."""

    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="+")
    origin = models.ForeignKey(Region, on_delete=models.CASCADE, related_name="+")
    serving_class = models.CharField(max_length=16)

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return str(self.key)

    @property
    def key(self) -> SeriesKey:
        return SeriesKey(self.deployment_id, self.origin_id, self.serving_class)


class DemandDay(Series):
    """A day (UTC) of a series. `loads` are mean concurrent requests per five minutes from midnight on, null if
    incompletely reported; the list ends with the last measured slot."""

    day = models.DateField()
    loads = ArrayField(models.FloatField(null=True), default=list)

    class Meta:
        ordering = ["deployment_id", "origin_id", "serving_class", "day"]
        constraints = [
            models.UniqueConstraint(fields=["deployment", "origin", "serving_class", "day"], name="demand_day_once")
        ]


class DemandForecast(Series):
    """The newest forecast of a series: slots of `slot_s` seconds from `made_at` on, and the `methods` of each. `ledger`
    is the `Calibration` (`fleet.capacity.planning.forecast`) as of `ledger_at`; `is_judged`: its quantiles are based on
    past errors."""

    made_at = models.DateTimeField()
    slot_s = models.PositiveIntegerField()
    p50 = ArrayField(models.FloatField())
    p90 = ArrayField(models.FloatField())
    p99 = ArrayField(models.FloatField())
    methods = ArrayField(models.CharField(max_length=16))
    is_judged = models.BooleanField(default=False)
    ledger = models.JSONField(default=dict)
    ledger_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["deployment_id", "origin_id", "serving_class"]
        constraints = [
            models.UniqueConstraint(fields=["deployment", "origin", "serving_class"], name="forecast_of_series")
        ]


class ForecastRecord(models.Model):
    """Half-hourly forecasts by method at `LEADS` (`fleet.capacity.planning.forecast_series`), kept until they have been
    compared with demand."""

    series = models.ForeignKey(DemandForecast, on_delete=models.CASCADE, related_name="records")
    made_at = models.DateTimeField(db_index=True)
    p50 = models.JSONField()
    p90 = models.JSONField()

    class Meta:
        ordering = ["series_id", "made_at"]
        constraints = [models.UniqueConstraint(fields=["series", "made_at"], name="forecast_record_once")]

    def __str__(self) -> str:
        return f"forecasts of {self.series_id} at {self.made_at:%Y-%m-%d %H:%M}"
