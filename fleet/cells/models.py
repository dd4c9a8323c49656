"""Tables of cells, their members, and the disruption ledger. A cell is started, routed and stopped as a whole."""

from django.db import models

from engine_agent.protocol.states import CellRole, MemberRole
from fleet.deployments.models import Deployment
from fleet.nodes.models import Node
from fleet.reconcile.planning.states import CELL_TONE, CellState, DisruptionCause, choices
from fleet.regions.models import Region
from fleet.rollouts.models import Rollout
from kernel.tones import Tone
from models_registry.instance_types.models import InstanceType
from models_registry.versions.models import ModelVersion


class Cell(models.Model):
    """One replica of a model. Every start of its engine is a new `generation`, and orders are bound to (cell,
    generation). `secret` authenticates the members of one generation to each other. `restarts`: starts since it was
    last ready, which sets the back-off. `unrouted_at`: every ingress has acknowledged a table that sends it no new
    requests. `failed_by`: the node whose report made it fail. `role` and `model_version` belong to the generation;
    `instance_type` never changes."""

    id = models.CharField(max_length=160, primary_key=True)
    deployment = models.ForeignKey(Deployment, on_delete=models.PROTECT, related_name="cells")
    region = models.ForeignKey(Region, on_delete=models.PROTECT, related_name="cells")
    instance_type = models.ForeignKey(InstanceType, on_delete=models.PROTECT, related_name="cells")
    model_version = models.ForeignKey(ModelVersion, on_delete=models.PROTECT, related_name="cells")
    role = models.CharField(max_length=8, choices=choices(CellRole), default=CellRole.MIXED.value)
    state = models.CharField(max_length=16, choices=choices(CellState), default=CellState.PENDING)
    reason = models.TextField(blank=True)
    failed_by = models.CharField(max_length=64, blank=True)
    generation = models.PositiveIntegerField(default=0)
    secret = models.CharField(max_length=64, blank=True)
    restarts = models.PositiveIntegerField(default=0)
    unrouted_at = models.DateTimeField(null=True)
    created_at = models.DateTimeField()
    state_since = models.DateTimeField()

    class Meta:
        ordering = ["deployment_id", "region_id", "created_at", "id"]
        indexes = [models.Index(fields=["state"], name="cell_state")]

    def __str__(self) -> str:
        return self.id

    @property
    def tone(self) -> Tone:
        return CELL_TONE[CellState(self.state)]


class CellMember(models.Model):
    """A node's rank in a cell. The database rejects a node in two cells and two nodes at one rank."""

    cell = models.ForeignKey(Cell, on_delete=models.CASCADE, related_name="members")
    node = models.OneToOneField(Node, on_delete=models.PROTECT, related_name="member")
    rank = models.PositiveIntegerField()

    class Meta:
        ordering = ["cell_id", "rank"]
        constraints = [models.UniqueConstraint(fields=["cell", "rank"], name="cell_rank_once")]

    def __str__(self) -> str:
        return f"{self.cell_id} rank {self.rank}: {self.node_id}"

    @property
    def role(self) -> MemberRole:
        return MemberRole.LEADER if self.rank == 0 else MemberRole.FOLLOWER


class Disruption(models.Model):
    """An entry of the disruption ledger: an available cell that was drained on purpose, until it is ready again or
    gone; or a machine whose layout changes, until it has the other layout. Written in the transaction that drains the
    cell or retires the machine's nodes (I10)."""

    cell = models.ForeignKey(Cell, on_delete=models.CASCADE, null=True, related_name="disruptions")
    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, null=True, related_name="disruptions")
    machine = models.ForeignKey("Machine", on_delete=models.CASCADE, null=True, related_name="disruptions")
    region = models.ForeignKey(Region, on_delete=models.CASCADE, related_name="disruptions")
    cause = models.CharField(max_length=16, choices=choices(DisruptionCause))
    rollout = models.ForeignKey(Rollout, on_delete=models.SET_NULL, null=True, related_name="disruptions")
    reason = models.TextField()
    opened_at = models.DateTimeField()
    closed_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["region"], name="disruption_open", condition=models.Q(closed_at__isnull=True))]
        constraints = [
            models.UniqueConstraint(
                fields=["cell"], condition=models.Q(closed_at__isnull=True), name="disruption_open_once"
            ),
            models.UniqueConstraint(
                fields=["machine"], condition=models.Q(closed_at__isnull=True), name="disruption_of_machine_once"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.cell_id or self.machine_id} down for {self.cause}"
