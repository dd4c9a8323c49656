"""Tables of rollouts: the move of a deployment from one model version to another, and the points of its charts."""

from django.db import models

from fleet.deployments.models import Deployment
from fleet.reconcile.planning.states import ROLLOUT_ACTIVE, ROLLOUT_TONE, RolloutState, choices
from kernel.tones import Tone
from models_registry.benchmarks.planning.workload import ComparedGoodput
from models_registry.versions.models import ModelVersion


class Rollout(models.Model):
    """At most one rollout of a deployment is active. `revision` grows with every change; changes compare and set it.
    `policy`: the copy that this rollout follows; `region_order`: regions in the order of their turn; `failed`: failed
    starts of updated cells; `counters`: the cells' counters when the current bake began; `verdict`: the last gate's
    finding with its numbers."""

    deployment = models.ForeignKey(Deployment, on_delete=models.PROTECT, related_name="rollouts")
    from_version = models.ForeignKey(ModelVersion, on_delete=models.PROTECT, related_name="rollouts_away")
    to_version = models.ForeignKey(ModelVersion, on_delete=models.PROTECT, related_name="rollouts")
    state = models.CharField(max_length=16, choices=choices(RolloutState), default=RolloutState.RUNNING.value)
    reason = models.TextField()
    cause = models.TextField(blank=True, help_text="Why it paused, rolled back or ended early. Empty after a resume.")
    why = models.TextField(blank=True)
    stage = models.PositiveIntegerField(default=0)
    region_order = models.JSONField()
    policy = models.JSONField()
    failed = models.JSONField(default=list, blank=True)
    counters = models.JSONField(default=dict, blank=True)
    verdict = models.JSONField(null=True)
    actor = models.CharField(max_length=64)
    revision = models.PositiveIntegerField(default=1)
    created_at = models.DateTimeField()
    state_since = models.DateTimeField()
    ended_at = models.DateTimeField(null=True)

    compared_goodput: tuple[ComparedGoodput, ...] = ()
    """Not a column. `fleet.rollouts.selectors.active_rollouts` sets it if the policy's gate needs it."""

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["deployment"],
                condition=models.Q(state__in=sorted(state.value for state in ROLLOUT_ACTIVE)),
                name="rollout_active_once",
            ),
        ]

    def __str__(self) -> str:
        return f"rollout {self.pk} of {self.deployment_id}"

    @property
    def tone(self) -> Tone:
        return ROLLOUT_TONE[RolloutState(self.state)]

    @property
    def is_active(self) -> bool:
        return RolloutState(self.state) in ROLLOUT_ACTIVE

    @property
    def headline(self) -> str:
        """The sentence that explains its state: the cause, once it stopped moving forward."""
        return self.cause or self.reason


class RolloutPoints(models.Model):
    """Points of a rollout's charts. They are stored because load history is thinned within an hour.

    `lines`: measure of `fleet.rollouts.selectors` -> values of the new and the old version, one every `step_s` seconds
    from `start`. Their number is limited; beyond it, steps become longer."""

    rollout = models.OneToOneField(Rollout, on_delete=models.CASCADE, primary_key=True, related_name="points")
    start = models.DateTimeField()
    step_s = models.PositiveIntegerField()
    lines = models.JSONField()

    def __str__(self) -> str:
        return f"points of rollout {self.rollout_id}"
