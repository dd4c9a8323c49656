"""What cells, deployments and regions carried over time: bounded series in three steps, and where counting stands."""

from django.db import models


class LoadSubject(models.Model):
    """Something whose load is kept: `fleet`, `region:<name>`, `deployment:<name>`, `deployment:<name>@<region>` or
    `cell:<id>`. `index` numbers the last fine window that it got; `memory` is what the next one is counted from, in
    the form of `fleet.load.planner.Accumulator`."""

    name = models.CharField(max_length=200, unique=True)
    index = models.BigIntegerField(default=0)
    memory = models.BinaryField(default=bytes)
    seen_at = models.DateTimeField()

    def __str__(self) -> str:
        return self.name


class LoadWindow(models.Model):
    """A window of `step_s` seconds from `at`. `covered_s` are the seconds that its counts come from; gauges are means.

    `slow`: first tokens that came later than the deployment's objective. Latencies are None without samples.
    """

    pk = models.CompositePrimaryKey("subject_id", "step_s", "at")
    subject = models.ForeignKey(LoadSubject, on_delete=models.CASCADE, related_name="windows", db_index=False)
    step_s = models.PositiveSmallIntegerField()
    at = models.DateTimeField()
    covered_s = models.FloatField()
    requests = models.PositiveBigIntegerField()
    errors = models.PositiveBigIntegerField()
    slow = models.PositiveBigIntegerField()
    cells = models.FloatField()
    in_flight = models.FloatField()
    queued = models.FloatField()
    tokens_per_s = models.FloatField()
    ttft_p50_ms = models.FloatField(null=True)
    ttft_p95_ms = models.FloatField(null=True)
    itl_p50_ms = models.FloatField(null=True)
    itl_p95_ms = models.FloatField(null=True)

    def __str__(self) -> str:
        return f"{self.step_s} s of subject {self.subject_id} from {self.at:%Y-%m-%d %H:%M:%S}"


class RefusedRequests(models.Model):
    """Requests of one deployment that an ingress's clients saw fail and that no cell counts. No deployment: those that
    failed before their model was known.

    `codes` are the totals that the ingress reported last, of the count that `since` names. `total` is the sum over all
    its counts, `at` when that last grew. `sampled`: how much of it is in windows.
    """

    ingress = models.CharField(max_length=64)
    region = models.CharField(max_length=64)
    deployment = models.CharField(max_length=96, blank=True)
    since = models.CharField(max_length=40)
    codes = models.JSONField()
    total = models.PositiveBigIntegerField(default=0)
    sampled = models.PositiveBigIntegerField(default=0)
    at = models.DateTimeField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["ingress", "deployment"], name="refused_at_ingress_once")]

    def __str__(self) -> str:
        return f"refused by {self.ingress} of {self.deployment}"
