"""Tables of searches over configurations: what is varied, each configuration, and each measurement of one."""

from django.db import models

from kernel.tones import Tone
from models_registry.models.benchmark import Benchmark
from models_registry.models.version import ModelVersion
from models_registry.planning.benchmark import BENCHMARK_TONE, BenchmarkState
from models_registry.planning.configuration_search import Choice, SearchLimits
from models_registry.planning.lifecycle import choices
from models_registry.planning.varied_columns import frozen_choice


class ConfigurationSearch(models.Model):
    """A search around a version. `varied`: name -> values; `rules`: of points at their whole length, as of a benchmark.

    It has the states of a benchmark. `reason`: what it does now, or what was found. `ends_as`: the state that it will
    have once the deployment serves the version again that it had before; empty: it goes on. `best`: the configuration
    that was found. `cells_before`: the cells that the deployment had, where they are varied or apart; null: they stay.
    """

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
    """One configuration. `choice`: pairs of name and value. `version`: its draft, once there is one; `refused`: why it
    cannot be measured."""

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
    """One measurement of a configuration, with points of `fidelity` of their length. `score`: requests a second and
    chip, 0 where no rate held; null: it goes on."""

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
