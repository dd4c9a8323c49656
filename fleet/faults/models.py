"""Tables of faults: incidents with their parts and notes, hardware signals, replacements, repairs, rule modes and
observations of ranks and ingresses."""

from django.db import models

from fleet.faults.planning.severity import RUNBOOK_OF_KIND, Severity, severity_of
from fleet.faults.planning.views import PartNoun, Rule, RuleMode
from fleet.nodes.models import Node
from fleet.reconcile.planning.states import INCIDENT_TONE, IncidentState, choices
from kernel.tones import Tone


class Incident(models.Model):
    """A fault that an operator or a planner must fix. At most one is open per (kind, subject).

    `shadow`: its rule only reports what it would have done. `cohort`: the group of similar machines that it was
    compared with. `seen_at`: when the fault was last seen. `muted_until`: an operator dismissed it until then. `owner`:
    the user who works on it."""

    kind = models.CharField(max_length=64)
    subject = models.CharField(max_length=160)
    state = models.CharField(max_length=16, choices=choices(IncidentState), default=IncidentState.OPEN)
    summary = models.TextField()
    resolution = models.TextField(blank=True)
    region = models.CharField(max_length=64, blank=True)
    deployment = models.CharField(max_length=128, blank=True)
    cell = models.CharField(max_length=160, blank=True)
    node = models.CharField(max_length=64, blank=True)
    evidence = models.JSONField(default=dict, blank=True)
    cohort = models.CharField(max_length=200, blank=True)
    shadow = models.BooleanField(default=False)
    closed_by = models.CharField(max_length=64, blank=True)
    acknowledged_by = models.CharField(max_length=64, blank=True)
    acknowledged_at = models.DateTimeField(null=True)
    owner = models.CharField(max_length=64, blank=True)
    seen_at = models.DateTimeField(null=True)
    muted_until = models.DateTimeField(null=True)
    opened_at = models.DateTimeField()
    closed_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-id"]
        indexes = [
            models.Index(fields=["muted_until"], name="incident_muted"),
            models.Index(fields=["kind", "-id"], name="incident_of_kind"),
        ]
        constraints = [
            models.UniqueConstraint(
                fields=["kind", "subject"],
                condition=models.Q(state=IncidentState.OPEN.value),
                name="incident_open_once",
            ),
        ]

    def __str__(self) -> str:
        return self.summary

    @property
    def tone(self) -> Tone:
        return Tone.IDLE if self.shadow else INCIDENT_TONE[IncidentState(self.state)]

    @property
    def severity(self) -> Severity:
        return severity_of(self.kind, shadow=self.shadow)

    @property
    def runbook(self) -> str:
        """The name of its page in docs/runbooks, "" if it has none."""
        return RUNBOOK_OF_KIND.get(self.kind, "")


class IncidentPart(models.Model):
    """A node or cell that the fault hit, until it has recovered. The death of a node is one incident with its cell."""

    incident = models.ForeignKey(Incident, on_delete=models.CASCADE, related_name="parts")
    noun = models.CharField(max_length=8, choices=choices(PartNoun))
    name = models.CharField(max_length=160)
    since = models.DateTimeField()
    recovered_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["id"]
        indexes = [models.Index(fields=["noun", "name"], name="incident_part_of")]
        constraints = [models.UniqueConstraint(fields=["incident", "noun", "name"], name="incident_part_once")]

    def __str__(self) -> str:
        return f"{self.noun} {self.name}"


class IncidentNote(models.Model):
    """What a user wrote about an incident."""

    incident = models.ForeignKey(Incident, on_delete=models.CASCADE, related_name="notes")
    at = models.DateTimeField()
    actor = models.CharField(max_length=64)
    text = models.TextField()

    class Meta:
        ordering = ["id"]

    def __str__(self) -> str:
        return f"{self.actor}: {self.text}"


class Signal(models.Model):
    """A fault signature that a node's agent saw `count` times. It is settled when the fault was fixed or dismissed.

    A node has at most one unsettled signal of a signature. `instance_type` stays readable after the node is retired."""

    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="signals")
    instance_type = models.CharField(max_length=64)
    signature = models.CharField(max_length=64)
    summary = models.TextField()
    evidence = models.JSONField(default=dict, blank=True)
    cell = models.CharField(max_length=160, blank=True)
    count = models.PositiveIntegerField(default=1)
    first_at = models.DateTimeField()
    last_at = models.DateTimeField(db_index=True)
    settled_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["node", "signature"], condition=models.Q(settled_at__isnull=True), name="signal_unsettled_once"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.node_id}: {self.signature}"


class Replacement(models.Model):
    """The replacement of a faulty node by another one. At most one is open per node.

    `begun_at`: when the node was taken out of use; until then its cell is being drained. `cell`: the node's cell at
    that time, if any."""

    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="replacements")
    cell = models.CharField(max_length=160, blank=True)
    rule = models.CharField(max_length=32, choices=choices(Rule))
    reason = models.TextField()
    actor = models.CharField(max_length=64, default="switchyard")
    incident = models.ForeignKey(Incident, on_delete=models.SET_NULL, null=True, related_name="replacements")
    opened_at = models.DateTimeField()
    begun_at = models.DateTimeField(null=True)
    closed_at = models.DateTimeField(null=True)
    resolution = models.TextField(blank=True)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["node"], condition=models.Q(closed_at__isnull=True), name="replacement_open_once"
            ),
        ]

    def __str__(self) -> str:
        return f"replacement of {self.node_id}"


class Repair(models.Model):
    """One repair of a node. Too many repairs in a week need an operator.

    Of a reset or reboot, which is an attempt until it has ended: `request`: its deep checks (`NodeCheck`), "" before
    they were ordered; `cured` and `result`: what they showed."""

    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="repairs")
    what = models.CharField(max_length=32)
    reason = models.TextField()
    at = models.DateTimeField(db_index=True)
    request = models.CharField(max_length=64, blank=True)
    ended_at = models.DateTimeField(null=True)
    cured = models.BooleanField(default=False)
    result = models.TextField(blank=True)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["node"],
                condition=models.Q(ended_at__isnull=True, what__in=["reboot_machine", "reset_device"]),
                name="repair_tried_once",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.node_id}: {self.what}"


class FaultRule(models.Model):
    """The mode that was set for a rule. A rule without a row is on."""

    rule = models.CharField(max_length=32, primary_key=True, choices=choices(Rule))
    mode = models.CharField(max_length=8, choices=choices(RuleMode))
    actor = models.CharField(max_length=64)
    changed_at = models.DateTimeField()

    class Meta:
        ordering = ["rule"]

    def __str__(self) -> str:
        return f"{self.rule} is {self.mode}"


class CellSighting(models.Model):
    """Cells that an ingress cannot reach, which makes it a second witness besides the cells' agents.

    `down` maps the ID of an unreachable cell to its generation. Only the latest report counts."""

    witness = models.CharField(max_length=64, primary_key=True)
    seen_at = models.DateTimeField()
    down = models.JSONField(default=dict, blank=True)

    def __str__(self) -> str:
        return self.witness


class StepRecord(models.Model):
    """A rank's measurements in recent windows (`fleet.faults.planning.views.StepWindow`), oldest first.

    `index` is the current window, and `totals` are the rank's counters at its start."""

    node = models.OneToOneField(Node, on_delete=models.CASCADE, primary_key=True, related_name="step_record")
    cell = models.CharField(max_length=160)
    generation = models.IntegerField()
    index = models.BigIntegerField()
    totals = models.JSONField(default=dict)
    windows = models.JSONField(default=list)

    def __str__(self) -> str:
        return f"{self.node_id} up to window {self.index}"
