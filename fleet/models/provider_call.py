"""What providers are to do with machines, and what they last said of them. The reconciler writes the orders, the loop
`fleet.provision` carries them out.
"""

from django.db import models

from fleet.models.node import Node
from fleet.planning.snapshot import ProviderStatus
from fleet.planning.states import ProviderAction, choices


class ProviderCall(models.Model):
    """One order to a provider that is not carried out yet; a node has at most one. The row ends with the call.

    `claim` names the attempt that is at it until `claimed_until`; after that another one may begin. `attempts`: since
    one came back. `near`: the network nodes below which a machine should stand. Launches of the same `unit` are made by
    one call; empty: alone.
    """

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
    """How a provider last described the machine of a node in doubt. `described_at`: when it was asked."""

    node = models.OneToOneField(Node, on_delete=models.CASCADE, primary_key=True, related_name="machine_status")
    status = models.CharField(max_length=16, choices=[(status.value, status.value) for status in ProviderStatus])
    described_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"{self.node_id}: {self.status}"
