"""Benchmarks of model versions and what was measured. What has ended is never changed: the database refuses it."""

from django.db import models

from kernel.tones import Tone
from models_registry.models.version import ModelVersion
from models_registry.planning.benchmark import BENCHMARK_TONE, BenchmarkKey, BenchmarkState
from models_registry.planning.lifecycle import choices
from models_registry.planning.workload import Slo, Workload, parse_slo, parse_workload


class Benchmark(models.Model):
    """One search for the goodput of a version. `key` is the digest of what it is known by, `conditions` that of all but
    the version; several may have the same. At most one is running.

    `workload` and `slo` are sentences (`models_registry.planning.workload`). `cells`, `chips`, `watts` (rated, of all
    nodes) and `price_per_hour` are those of the deployment's cells in the region as it began; `split`: how many of them
    had which role (`1p+3d`), empty: all were mixed. `rules` states what differs from `GoodputRules`. `progress` is of
    the point that is being measured, `statistics` says what the workload has of shared prefixes. `goodput` is the
    highest rate that held, in requests a second of all cells, and `broke_at` the lowest that broke; null: none.
    `concurrency`: requests at once, on average, of a cell that answers, at the rate that held.
    `troubles` counts points that came to nothing.
    """

    version = models.ForeignKey(ModelVersion, on_delete=models.PROTECT, related_name="benchmarks")
    deployment = models.CharField(max_length=96)
    region = models.CharField(max_length=64)
    state = models.CharField(max_length=16, choices=choices(BenchmarkState), default=BenchmarkState.QUEUED.value)
    reason = models.TextField(blank=True)
    key = models.CharField(max_length=16, blank=True, db_index=True)
    conditions = models.CharField(max_length=16, blank=True, db_index=True)
    version_digest = models.CharField(max_length=16, blank=True)
    instance_type = models.CharField(max_length=64, blank=True)
    fingerprint = models.CharField(max_length=16, blank=True)
    workload = models.CharField(max_length=200)
    slo = models.CharField(max_length=80)
    seed = models.PositiveIntegerField(default=0)
    rules = models.JSONField(default=dict, blank=True)
    beside_traffic = models.BooleanField(default=False)
    cells = models.PositiveIntegerField(default=0)
    split = models.CharField(max_length=40, blank=True)
    chips = models.PositiveIntegerField(default=0)
    watts = models.FloatField(default=0)
    price_per_hour = models.FloatField(default=0)
    statistics = models.JSONField(default=dict, blank=True)
    first_rate = models.FloatField(null=True)
    progress = models.JSONField(default=dict, blank=True)
    troubles = models.PositiveIntegerField(default=0)
    goodput = models.FloatField(null=True)
    broke_at = models.FloatField(null=True)
    concurrency = models.FloatField(null=True)
    actor = models.CharField(max_length=64)
    created_at = models.DateTimeField()
    started_at = models.DateTimeField(null=True)
    seen_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["state"],
                condition=models.Q(state=BenchmarkState.RUNNING.value),
                name="benchmark_running_once",
            ),
        ]

    def __str__(self) -> str:
        return f"benchmark {self.pk} of {self.version}"

    @property
    def tone(self) -> Tone:
        return BENCHMARK_TONE[BenchmarkState(self.state)]

    def known_by(self) -> BenchmarkKey:
        """What it measured, as its key has it."""
        workload = self.parsed_workload().digest
        machine = (self.instance_type, self.fingerprint)
        return BenchmarkKey(self.version_digest, *machine, workload, self.slo, self.seed, self.split)

    @property
    def answering(self) -> int:
        """Its cells that answer; the others read prompts for them."""
        return self.cells - int(self.split.partition("p")[0] or 0)

    def parsed_workload(self) -> Workload:
        return parse_workload(self.workload)

    def parsed_slo(self) -> Slo:
        return parse_slo(self.slo)


class BenchmarkPoint(models.Model):
    """One rate that was measured: requests a second of all cells together. `figures` has the numbers of
    `models_registry.planning.point_figures`, `histograms` the counts by bucket of `engine_agent.protocol.metrics`."""

    benchmark = models.ForeignKey(Benchmark, on_delete=models.CASCADE, related_name="points")
    number = models.PositiveIntegerField()
    rate = models.FloatField()
    verdict = models.CharField(max_length=16)
    reason = models.TextField()
    figures = models.JSONField()
    histograms = models.JSONField()
    measured_at = models.DateTimeField()

    class Meta:
        ordering = ["benchmark_id", "number"]
        constraints = [
            models.UniqueConstraint(fields=["benchmark", "number"], name="benchmark_point_once"),
            models.UniqueConstraint(fields=["benchmark", "rate"], name="benchmark_rate_once"),
        ]

    def __str__(self) -> str:
        return f"{self.rate:g}/s of {self.benchmark}"
