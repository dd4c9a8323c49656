"""The tables of agent releases, their rollouts, and the last order of each agent."""

from django.db import models

from fleet.reconcile.planning.states import AGENT_ROLLOUT_ACTIVE, AGENT_ROLLOUT_TONE, AgentRolloutState, choices
from kernel.tones import Tone


class AgentRelease(models.Model):
    """A release of the agent. `is_current`: new agents run it, and returning ones catch up to it; exactly one is.
    `archives`: Python and processor, such as `cp311-x86_64`, to `digest` and `size_bytes`."""

    id = models.CharField(max_length=16, primary_key=True)
    version = models.CharField(max_length=32)
    protocol = models.PositiveIntegerField()
    is_current = models.BooleanField(default=False)
    archives = models.JSONField(default=dict, blank=True)
    created_at = models.DateTimeField()

    class Meta:
        ordering = ["-created_at", "-id"]
        constraints = [
            models.UniqueConstraint(fields=["is_current"], condition=models.Q(is_current=True), name="release_current"),
        ]

    def __str__(self) -> str:
        return f"{self.version}+{self.id}"


class AgentRollout(models.Model):
    """A rollout of all agents from one release to another, ring by ring; one is active at a time. `ring`: the current
    one, from 0, of `rings`. `revision` grows with every change and guards compare-and-set."""

    source = models.ForeignKey(AgentRelease, on_delete=models.PROTECT, related_name="rollouts_away")
    target = models.ForeignKey(AgentRelease, on_delete=models.PROTECT, related_name="rollouts")
    state = models.CharField(max_length=16, choices=choices(AgentRolloutState))
    reason = models.TextField(blank=True)
    ring = models.PositiveIntegerField(default=0)
    rings = models.PositiveIntegerField(default=1)
    soak_s = models.FloatField()
    actor = models.CharField(max_length=64)
    why = models.TextField(blank=True)
    revision = models.PositiveIntegerField(default=1)
    created_at = models.DateTimeField()
    ring_since = models.DateTimeField()
    ended_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(
                models.Value(1),
                condition=models.Q(state__in=sorted(state.value for state in AGENT_ROLLOUT_ACTIVE)),
                name="agent_rollout_once",
            ),
        ]

    def __str__(self) -> str:
        return f"agents' rollout {self.pk} to {self.target_id}"

    @property
    def tone(self) -> Tone:
        return AGENT_ROLLOUT_TONE[AgentRolloutState(self.state)]

    @property
    def is_active(self) -> bool:
        return AgentRolloutState(self.state) in AGENT_ROLLOUT_ACTIVE


class AgentMove(models.Model):
    """The last order of one agent. `rollout` null: to catch up. `ring` of that rollout.

    `moved_at` null: its turn has not come. `before`: the agent and its engine then, as
    `fleet.releases.planner.Standing`; `settled_at`: healthy with the new release since then. `attempt` counts its
    moves; `trouble`: why its provider cannot move it."""

    agent = models.CharField(max_length=64, primary_key=True)
    rollout = models.ForeignKey(AgentRollout, on_delete=models.SET_NULL, null=True, related_name="moves")
    ring = models.PositiveIntegerField(default=0)
    release = models.CharField(max_length=16)
    moved_at = models.DateTimeField(null=True)
    before = models.JSONField(null=True)
    settled_at = models.DateTimeField(null=True)
    attempt = models.PositiveIntegerField(default=0)
    trouble = models.TextField(blank=True)

    def __str__(self) -> str:
        return f"{self.agent} to {self.release}"
