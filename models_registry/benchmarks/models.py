"""Tables of benchmarks, configuration searches and their measurements. The database rejects changes to ended ones."""

from django.db import models

from kernel.tones import Tone
from models_registry.benchmarks.planning.configuration_search import Choice, SearchLimits, frozen_choice
from models_registry.benchmarks.planning.workload import (
    BENCHMARK_TONE,
    BenchmarkState,
    Slo,
    Workload,
    parse_slo,
    parse_workload,
)
from models_registry.versions.models import ModelVersion
from models_registry.versions.planning.lifecycle import choices


class Benchmark(models.Model):
    """One measurement of a version's goodput. `key` is the digest of everything that was measured, `conditions` that of
    everything except the version; several benchmarks may share them. At most one runs.

    `workload` and `slo` are texts (`models_registry.benchmarks.planning.workload`). `cells`, `chips`, `watts` (rated)
    and `price_per_hour` are totals over the deployment's cells in the region at the start. `split` is the number of
    cells per role (`1p+3d`); empty: all are mixed. `rules` has the changes to `GoodputRules`. `progress` is that of the
    current point; `statistics` describes shared prefixes of the workload. `goodput` is the highest rate that held, in
    requests per second of all cells, `broke_at` the lowest that broke; null: none. `concurrency` is the mean number of
    concurrent requests per answering cell at `goodput`. `troubles` counts failed points."""

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

    @property
    def answering(self) -> int:
        """Cells that answer; the others are prefill cells."""
        return self.cells - int(self.split.partition("p")[0] or 0)

    def parsed_workload(self) -> Workload:
        return parse_workload(self.workload)

    def parsed_slo(self) -> Slo:
        return parse_slo(self.slo)


class BenchmarkPoint(models.Model):
    """One measured rate: requests per second of all cells together. `figures` are those of
    `models_registry.benchmarks.planning.measurements`, `histograms` counts by bucket of
    `engine_agent.protocol.metrics`."""

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


class ConfigurationSearch(models.Model):
    """A search around a version. `varied`: name -> values; `rules`: those of full points, as for a benchmark.

    It has the states of a benchmark. `reason`: the current step, or the result. `ends_as`: the state that it enters
    once the deployment serves its original version again; empty while it measures. `best`: the best configuration.
    `cells_before`: the deployment's original cells, if they are varied or have roles; null: unchanged."""

    version = models.ForeignKey(ModelVersion, on_delete=models.PROTECT, related_name="+")
    deployment = models.CharField(max_length=96)
    region = models.CharField(max_length=64)
    instance_type = models.CharField(max_length=64)
    workload = models.CharField(max_length=200)
    slo = models.CharField(max_length=80)
    seed = models.PositiveIntegerField(default=0)
    varied = models.JSONField()
    cells_before = models.JSONField(null=True)
    rules = models.JSONField(default=dict, blank=True)
    most_trials = models.PositiveIntegerField()
    most_hours = models.FloatField()
    state = models.CharField(max_length=16, choices=choices(BenchmarkState), default=BenchmarkState.RUNNING.value)
    ends_as = models.CharField(max_length=16, blank=True)
    reason = models.TextField(blank=True)
    found = models.TextField(blank=True)
    best = models.OneToOneField("SearchCandidate", on_delete=models.SET_NULL, null=True, related_name="+")
    actor = models.CharField(max_length=64)
    created_at = models.DateTimeField()
    seen_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["deployment"],
                condition=models.Q(state=BenchmarkState.RUNNING.value),
                name="search_running_once",
            ),
        ]

    def __str__(self) -> str:
        return f"search {self.pk} around {self.version}"

    @property
    def tone(self) -> Tone:
        return BENCHMARK_TONE[BenchmarkState(self.state)]

    def limits(self) -> SearchLimits:
        return SearchLimits(self.most_trials, self.most_hours * 3600)


class SearchCandidate(models.Model):
    """One configuration. `choice`: pairs of name and value. `version`: its draft, if any; `refused`: why it cannot be
    measured."""

    search = models.ForeignKey(ConfigurationSearch, on_delete=models.CASCADE, related_name="candidates")
    number = models.PositiveIntegerField()
    choice = models.JSONField()
    version = models.ForeignKey(ModelVersion, on_delete=models.SET_NULL, null=True, related_name="+")
    refused = models.TextField(blank=True)

    class Meta:
        ordering = ["search_id", "number"]
        constraints = [models.UniqueConstraint(fields=["search", "number"], name="search_candidate_once")]

    def __str__(self) -> str:
        return f"configuration {self.number} of search {self.search_id}"

    def as_choice(self) -> Choice:
        return frozen_choice(self.choice)


class SearchTrial(models.Model):
    """One measurement of a configuration with points of `fidelity` times the full length. `score`: requests per second
    and chip, 0 if no rate held; null while it runs."""

    candidate = models.ForeignKey(SearchCandidate, on_delete=models.CASCADE, related_name="trials")
    fidelity = models.FloatField()
    benchmark = models.OneToOneField(Benchmark, on_delete=models.PROTECT, null=True, related_name="trial")
    score = models.FloatField(null=True)
    begun_at = models.DateTimeField()

    class Meta:
        ordering = ["id"]
        constraints = [models.UniqueConstraint(fields=["candidate", "fidelity"], name="search_trial_once")]

    def __str__(self) -> str:
        return f"{self.candidate} at {self.fidelity:.0%}"
