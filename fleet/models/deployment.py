"""Deployments: which model version serves, where, how many cells of it, and what load they carried over time."""

from django.db import models

from engine_agent.protocol.states import ServingClass
from fleet.models.region import InstanceType, Region
from fleet.planning.load.slo import Objective, parse_objective
from fleet.planning.policy import UpdatePolicy, parse_policy
from fleet.planning.states import choices
from models_registry.models import ModelVersion


class Deployment(models.Model):
    """A model version that should be served. `next_ordinal` numbers its cells; numbers are never used twice.

    `update_policy` states what differs from the defaults of `fleet.planning.policy.UpdatePolicy`, `slo` what differs
    from those of its serving class (`fleet.planning.load.slo`).
    """

    name = models.SlugField(max_length=96, primary_key=True)
    model_version = models.ForeignKey(ModelVersion, on_delete=models.PROTECT, related_name="deployments")
    instance_type = models.ForeignKey(InstanceType, on_delete=models.PROTECT, related_name="deployments")
    serving_class = models.CharField(max_length=16, choices=choices(ServingClass), default=ServingClass.REALTIME.value)
    drain_deadline_s = models.FloatField(default=60.0)
    update_policy = models.JSONField(default=dict, blank=True)
    slo = models.JSONField(default=dict, blank=True)
    next_ordinal = models.PositiveIntegerField(default=1)
    created_at = models.DateTimeField()

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    def policy(self) -> UpdatePolicy:
        """How its cells may be updated, the defaults filled in."""
        return parse_policy(self.update_policy)

    def objective(self) -> Objective:
        """What its users may expect, the defaults filled in."""
        return parse_objective(self.slo, ServingClass(self.serving_class))


class DeploymentRegion(models.Model):
    """How many cells of a deployment a region should have."""

    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="regions")
    region = models.ForeignKey(Region, on_delete=models.PROTECT, related_name="deployments")
    cells = models.PositiveIntegerField()

    class Meta:
        ordering = ["deployment_id", "region_id"]
        constraints = [models.UniqueConstraint(fields=["deployment", "region"], name="deployment_once_per_region")]

    def __str__(self) -> str:
        return f"{self.deployment_id} in {self.region_id}: {self.cells}"


class LoadSubject(models.Model):
    """Something whose load is kept: `fleet`, `region:<name>`, `deployment:<name>`, `deployment:<name>@<region>` or
    `cell:<id>`. `index` numbers the last fine window that it got; `memory` is what the next one is counted from, in
    the form of `fleet.planning.load.history.Accumulator`."""

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
