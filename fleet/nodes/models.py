"""Tables of nodes, their agents' latest reports, and agents' credentials. Reports have their own table because they
change every second. Only hashes of secrets are stored; a prefix finds the row."""

from datetime import datetime

from django.db import models

from engine_agent.protocol.states import AgentKind
from fleet.nodes.planner import LISTENING_TTL
from fleet.reconcile.planning.states import NODE_TONE, NodeState, choices
from fleet.regions.models import Region
from kernel.tones import Tone
from models_registry.instance_types.models import InstanceType


class Node(models.Model):
    """A machine that runs an agent. A node in no cell is a spare. `desired_version` grows with every change of its
    orders; `topology`: network nodes, widest first; `accelerators`: one line per device that its agent found.
    `address`, `port_base` and `topology` are empty until the provider or the agent's hello states them.
    `terminated_at`: the provider confirmed the end of a retired node's machine. `cordoned_for_notice`: cordoned until
    its provider withdraws the notice. `markets`: where its machine may be bought (empty: any), or the market where it
    was bought. `prefetch`: versions, as `model@version`, whose builds and weights it fetches in advance."""

    id = models.CharField(max_length=32, primary_key=True)
    region = models.ForeignKey(Region, on_delete=models.PROTECT, related_name="nodes")
    instance_type = models.ForeignKey(InstanceType, on_delete=models.PROTECT, related_name="nodes")
    state = models.CharField(max_length=16, choices=choices(NodeState), default=NodeState.JOINING)
    reason = models.TextField(blank=True)
    cordoned = models.BooleanField(default=False)
    cordoned_for_notice = models.BooleanField(default=False)
    address = models.CharField(max_length=64, blank=True)
    port_base = models.PositiveIntegerField(null=True)
    topology = models.JSONField(default=list, blank=True)
    markets = models.JSONField(default=list, blank=True)
    fingerprint = models.JSONField(default=dict, blank=True)
    accelerators = models.JSONField(default=list, blank=True)
    prefetch = models.JSONField(default=list, blank=True)
    desired_version = models.BigIntegerField(default=1)
    spare_since = models.DateTimeField(null=True)
    terminated_at = models.DateTimeField(null=True)
    created_at = models.DateTimeField()
    state_since = models.DateTimeField()

    class Meta:
        ordering = ["region_id", "id"]
        indexes = [models.Index(fields=["region", "state"], name="node_region_state")]
        constraints = [
            models.UniqueConstraint(
                fields=["address", "port_base"],
                condition=~models.Q(state=NodeState.RETIRED.value) & ~models.Q(address=""),
                name="node_ports_once",
            ),
        ]

    def __str__(self) -> str:
        return self.id

    @property
    def tone(self) -> Tone:
        return NODE_TONE[NodeState(self.state)]

    def port(self, offset: int) -> int:
        """The port of one of its services, by the offset in `engine_agent.protocol.ports`. Raises ValueError if its
        ports are unknown, which never happens after the node has joined."""
        if self.port_base is None:
            raise ValueError(f"the ports of {self.id} are not known yet")
        return self.port_base + offset


class NodeReport(models.Model):
    """The latest report of a node's agent. An observation, never the desired state.

    While nothing changes the agent sends heartbeats, which are not stored: a report that is not `quiet` on an open
    connection holds as long as its `listener` runs (`fleet.nodes.planner.Listeners.heard_at`)."""

    node = models.OneToOneField(Node, on_delete=models.CASCADE, primary_key=True, related_name="report")
    connected = models.BooleanField(default=False)
    connection = models.CharField(max_length=40, blank=True)
    listener = models.CharField(max_length=16, blank=True)
    """The web process (`AgentListener`) that received the report."""
    quiet = models.BooleanField(default=False)
    """The agent has sent nothing since `last_seen_at`, although its connection is open."""
    connection_changed_at = models.DateTimeField(null=True)
    last_seen_at = models.DateTimeField(null=True)
    boot_id = models.CharField(max_length=64, blank=True)
    agent_version = models.CharField(max_length=32, blank=True)
    state = models.CharField(max_length=16, default="idle")
    cell = models.CharField(max_length=160, blank=True)
    generation = models.IntegerField(default=0)
    rank = models.IntegerField(null=True)
    reason = models.TextField(blank=True)
    engine_pid = models.IntegerField(null=True)
    health = models.JSONField(null=True)
    unhealthy_since = models.DateTimeField(null=True)
    load = models.JSONField(null=True)
    telemetry = models.JSONField(default=dict)
    steps = models.JSONField(null=True)

    def __str__(self) -> str:
        return f"{self.node_id}: {self.state}"


class AgentListener(models.Model):
    """A web process that agents connect to. `since`: when it began to keep up with their reports; NULL while it is
    behind. `until`: when it counts as ended unless it renews."""

    id = models.CharField(max_length=16, primary_key=True)
    since = models.DateTimeField(null=True)
    until = models.DateTimeField()

    def __str__(self) -> str:
        return f"listener {self.id}"


HOLDS_SINCE = f"""(report.last_seen_at > %(since)s OR report.connected AND NOT report.quiet AND report.listener IN (
    SELECT id FROM fleet_agentlistener WHERE until > %(since)s + interval '{LISTENING_TTL.total_seconds()} s'
))"""  # noqa: S608 - only a number
"""SQL for `holds_since` of `fleet_nodereport AS report`."""


def holds_since(since: datetime, report: str = "") -> models.Q:
    """Reports that were made or confirmed by a heartbeat after `since`. `report`: prefix of its lookups, such as
    `node__report__`."""
    listening = AgentListener.objects.filter(until__gt=since + LISTENING_TTL).values("id")
    lookups = {"connected": True, "quiet": False, "listener__in": listening}
    heard = models.Q(**{f"{report}{name}": value for name, value in lookups.items()})
    return models.Q(**{f"{report}last_seen_at__gt": since}) | heard


class NodeLog(models.Model):
    """The last lines of a node's logs. `logs`: `agent`, `engine` and `proxy` -> lines, oldest first. `wished_until`:
    the agent sends lines until then, because a user reads them. `said_at`: when it sent them, or None."""

    node = models.OneToOneField(Node, on_delete=models.CASCADE, primary_key=True, related_name="log")
    wished_until = models.DateTimeField()
    said_at = models.DateTimeField(null=True)
    cell = models.CharField(max_length=160, blank=True)
    generation = models.IntegerField(default=0)
    logs = models.JSONField(default=dict)

    def __str__(self) -> str:
        return f"logs of {self.node_id}"


class NodeCheck(models.Model):
    """The deep checks that a node was last ordered to make. Results are in its report (`telemetry.checks`). `request`:
    their ID; `peers`: nodes whose links are checked, by rank, including itself; `secret`: authenticates them to each
    other. `reset`: devices to reset before; empty: all of the node; null: none."""

    node = models.OneToOneField(Node, on_delete=models.CASCADE, primary_key=True, related_name="check_request")
    request = models.CharField(max_length=64)
    peers = models.JSONField(default=list)
    secret = models.CharField(max_length=64, blank=True)
    reset = models.JSONField(null=True)
    requested_at = models.DateTimeField()
    requested_by = models.CharField(max_length=150)

    def __str__(self) -> str:
        return f"checks {self.request} of {self.node_id}"


class JoinToken(models.Model):
    """A short-lived permission to enrol one agent that the control plane launched. Its first use binds it to the
    process that sent the number hashed in `nonce_digest`."""

    prefix = models.CharField(max_length=16, unique=True)
    digest = models.CharField(max_length=64)
    kind = models.CharField(max_length=16, choices=choices(AgentKind))
    subject = models.CharField(max_length=64)
    region = models.CharField(max_length=64)
    expires_at = models.DateTimeField()
    used_at = models.DateTimeField(null=True)
    nonce_digest = models.CharField(max_length=64, blank=True)

    def __str__(self) -> str:
        return f"join token {self.prefix} for {self.subject}"


class AgentCredential(models.Model):
    """An agent's credential for every connection. `bound_at`: since then it needs its agent's certificate, because it
    was once used with it."""

    prefix = models.CharField(max_length=16, unique=True)
    digest = models.CharField(max_length=64)
    kind = models.CharField(max_length=16, choices=choices(AgentKind))
    subject = models.CharField(max_length=64, db_index=True)
    region = models.CharField(max_length=64)
    created_at = models.DateTimeField()
    revoked_at = models.DateTimeField(null=True)
    bound_at = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return f"credential {self.prefix} of {self.subject}"
