"""The tables of machines and their slots, invitations, and orders to providers. Of secrets only hashes are stored."""

from datetime import datetime

import msgspec
from django.db import models

from engine_agent.protocol.machine_messages import MachineFacts, NodeResources
from engine_agent.protocol.ports import PORTS_PER_NODE
from fleet.capacity.planning.pools import Market
from fleet.nodes.models import Node
from fleet.reconcile.planning.snapshot import ProviderStatus
from fleet.reconcile.planning.states import MACHINE_TONE, MachineRole, MachineState, ProviderAction, choices
from fleet.regions.models import Region
from kernel.tones import Tone
from models_registry.instance_types.models import InstanceType


class Invitation(models.Model):
    """Permission for `count` machines to join, of which `left` remain, until `expires_at` or until withdrawn.
    `instance_type` null: as their agents detect. `layout`: how each is divided into nodes, which then have the type.

    The token's text is known only to its creator; `prefix` finds the row. `machine`: the attested cloud machine that it
    is for; `proof_digest`: of that proof."""

    prefix = models.CharField(max_length=16, unique=True)
    digest = models.CharField(max_length=64)
    region = models.ForeignKey(Region, on_delete=models.CASCADE, related_name="invitations")
    role = models.CharField(max_length=16, choices=choices(MachineRole))
    instance_type = models.ForeignKey(InstanceType, on_delete=models.CASCADE, null=True, related_name="invitations")
    layout = models.CharField(max_length=200, blank=True)
    count = models.PositiveIntegerField()
    left = models.PositiveIntegerField()
    created_by = models.CharField(max_length=64)
    created_at = models.DateTimeField()
    expires_at = models.DateTimeField()
    withdrawn_at = models.DateTimeField(null=True)
    machine = models.ForeignKey("Machine", on_delete=models.CASCADE, null=True, related_name="tickets")
    proof_digest = models.CharField(max_length=64, blank=True)

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"invitation {self.prefix}"

    def state_at(self, now: datetime) -> str:
        """Returns `open`, `used`, `expired` or `withdrawn`."""
        if self.withdrawn_at is not None:
            return "withdrawn"
        if self.left == 0:
            return "used"
        return "expired" if self.expires_at <= now else "open"


class Machine(models.Model):
    """One machine of any provider. `runs`: ID of its node or ingress, or "". `layout`: how its devices are divided into
    nodes, as `4x2`; the nodes are then in its `slots`. Empty: one node owns the whole machine. If
    `layout_changes`, it gets `next_layout` when its nodes are wiped, with nodes of `next_types`, in order; empty:
    detected. `layout_at`: when it got its layout. `layout_pinned`: only operators change it.

    `provider_id`: its name at the provider. `leaving`: an operator removed it; its node or ingress goes first. A
    machine with `revoked_at` is leaving, runs and enrols nothing new, and never returns under this ID. `broken`: its
    devices, or `machine`, that no node gets until they are repaired, with the reason. `instance_type`: stated in the
    invitation (`type_stated`) or detected by its agent. `desired_version` grows with every order.
    `release_trouble`: why its agents could not change to the release of `release_attempt`. `may_reboot`: whether the
    operator of a joined host allows reboots; `rebooted`: the last order of one that it ended, `reboot_trouble` why it
    did not reboot. `facts`: a `MachineFacts` of
    joined machines.

    Of a cloud machine: `launched_by`: its launch attempt; place; price in US dollars an hour (null: unknown);
    `cloud_state` as of `cloud_seen_at`; `cloud_reason`: why its cloud ended it, at `cloud_ended_at`; `absent_lists`:
    complete lists in a row without it; `topology_at`: last request for its network nodes."""

    id = models.CharField(max_length=32, primary_key=True)
    provider = models.CharField(max_length=32)
    provider_id = models.CharField(max_length=64)
    region = models.ForeignKey(Region, on_delete=models.PROTECT, related_name="machines")
    role = models.CharField(max_length=16, choices=choices(MachineRole), default=MachineRole.NODE.value)
    state = models.CharField(max_length=16, choices=choices(MachineState))
    reason = models.TextField(blank=True)
    runs = models.CharField(max_length=64, blank=True)
    layout = models.CharField(max_length=200, blank=True)
    layout_changes = models.BooleanField(default=False)
    next_layout = models.CharField(max_length=200, blank=True)
    next_types = models.JSONField(default=list, blank=True)
    layout_at = models.DateTimeField(null=True)
    layout_pinned = models.BooleanField(default=False)
    leaving = models.BooleanField(default=False)
    broken = models.JSONField(default=dict, blank=True)
    revoked_at = models.DateTimeField(null=True)
    address = models.CharField(max_length=64, blank=True)
    port_base = models.PositiveIntegerField(null=True)
    instance_type = models.ForeignKey(InstanceType, on_delete=models.PROTECT, null=True, related_name="machines")
    type_stated = models.BooleanField(default=False)
    invitation = models.ForeignKey(Invitation, on_delete=models.SET_NULL, null=True, related_name="machines")
    nonce_digest = models.CharField(max_length=64, blank=True)
    facts = models.JSONField(null=True)
    agent_version = models.CharField(max_length=32, blank=True)
    connected = models.BooleanField(default=False)
    connection = models.CharField(max_length=40, blank=True)
    last_seen_at = models.DateTimeField(null=True)
    phase = models.CharField(max_length=16, blank=True)
    agent_reason = models.TextField(blank=True)
    release_trouble = models.TextField(blank=True)
    release_attempt = models.PositiveIntegerField(default=0)
    may_reboot = models.BooleanField(default=False)
    rebooted = models.CharField(max_length=64, blank=True)
    reboot_trouble = models.TextField(blank=True)
    desired_version = models.BigIntegerField(default=1)
    launched_by = models.ForeignKey("LaunchAttempt", on_delete=models.SET_NULL, null=True, related_name="machines")
    zone = models.CharField(max_length=32, blank=True)
    market = models.CharField(max_length=16, choices=choices(Market), blank=True)
    image = models.CharField(max_length=330, blank=True)
    reservation = models.CharField(max_length=32, blank=True)
    price_per_hour = models.FloatField(null=True)
    cloud_state = models.CharField(max_length=16, blank=True)
    cloud_seen_at = models.DateTimeField(null=True)
    cloud_reason = models.TextField(blank=True)
    cloud_ended_at = models.DateTimeField(null=True)
    absent_lists = models.PositiveIntegerField(default=0)
    topology_at = models.DateTimeField(null=True)
    created_at = models.DateTimeField()
    state_since = models.DateTimeField()

    class Meta:
        ordering = ["region_id", "id"]
        indexes = [models.Index(fields=["provider", "region", "state"], name="machine_pool")]
        constraints = [
            models.UniqueConstraint(
                fields=["runs"],
                condition=~models.Q(runs="") & ~models.Q(state=MachineState.GONE.value),
                name="machine_runs_once",
            ),
            models.UniqueConstraint(
                fields=["provider", "provider_id"],
                condition=~models.Q(launched_by=None),
                name="machine_of_a_cloud_once",
            ),
        ]

    def __str__(self) -> str:
        return self.id

    @property
    def tone(self) -> Tone:
        return MACHINE_TONE[MachineState(self.state)]

    def stated_facts(self) -> MachineFacts | None:
        """Returns the facts that its agent detected; None if it did not join by an invitation."""
        return msgspec.convert(self.facts, MachineFacts) if self.facts else None


class MachineSlot(models.Model):
    """The place of one node on a machine with a layout. `owns`: a `NodeResources`, fixed until the layout changes.
    `runs`: ID of its node, or "". `phase` and `agent_reason`: as its machine reported them last."""

    machine = models.ForeignKey(Machine, on_delete=models.CASCADE, related_name="slots")
    number = models.PositiveSmallIntegerField()
    owns = models.JSONField()
    instance_type = models.ForeignKey(InstanceType, on_delete=models.PROTECT, null=True, related_name="slots")
    state = models.CharField(max_length=16, choices=choices(MachineState), default=MachineState.POOL.value)
    runs = models.CharField(max_length=64, blank=True)
    phase = models.CharField(max_length=16, blank=True)
    agent_reason = models.TextField(blank=True)

    class Meta:
        ordering = ["machine_id", "number"]
        constraints = [
            models.UniqueConstraint(fields=["machine", "number"], name="machine_slot_once"),
            models.UniqueConstraint(fields=["runs"], condition=~models.Q(runs=""), name="machine_slot_runs_once"),
        ]

    def __str__(self) -> str:
        return f"node {self.number} of {self.machine_id}"

    @property
    def tone(self) -> Tone:
        return MACHINE_TONE[MachineState(self.state)]

    @property
    def port_base(self) -> int:
        """The first of its node's ports."""
        return (self.machine.port_base or 0) + self.number * PORTS_PER_NODE

    @property
    def part(self) -> str:
        """What it owns, as `nvidia 2,3; 24 CPUs; 504 GiB`."""
        owns = self.resources()
        devices, cpus = ",".join(map(str, owns.devices)), len(owns.cpus)
        return f"{owns.kind} {devices}; {cpus} CPU{'s' * (cpus != 1)}; {owns.memory_bytes / 2**30:.0f} GiB"

    def resources(self) -> NodeResources:
        return msgspec.convert(self.owns, NodeResources)


# Orders to providers, and their last answers. The reconciler writes the orders, the loop
# `fleet.provision` carries them out.


class ProviderCall(models.Model):
    """A pending order to a provider; a node has at most one. The row is deleted with the call.

    `claim`: the attempt in progress until `claimed_until`; then another may begin. `attempts`: since one returned.
    `near`: network nodes under which the machine should be. Launches of the same `unit` are one call; empty: alone."""

    node = models.OneToOneField(Node, on_delete=models.CASCADE, primary_key=True, related_name="provider_call")
    action = models.CharField(max_length=16, choices=choices(ProviderAction))
    near = models.JSONField(default=list, blank=True)
    unit = models.CharField(max_length=16, blank=True)
    reason = models.TextField()
    requested_at = models.DateTimeField()
    due_at = models.DateTimeField()
    attempts = models.PositiveIntegerField(default=0)
    claim = models.CharField(max_length=32, blank=True)
    claimed_until = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return f"{self.action} of {self.node_id}"


class MachineStatus(models.Model):
    """A provider's last description of the machine of a node in doubt, as of `described_at`."""

    node = models.OneToOneField(Node, on_delete=models.CASCADE, primary_key=True, related_name="machine_status")
    status = models.CharField(max_length=16, choices=[(status.value, status.value) for status in ProviderStatus])
    described_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"{self.node_id}: {self.status}"
