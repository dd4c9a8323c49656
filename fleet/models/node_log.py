"""The last lines of nodes' logs, while a user reads them."""

from django.db import models

from fleet.models.node import Node


class NodeLog(models.Model):
    """What a node's agent sent last: `logs` maps `agent`, `engine` and `proxy` to lines, oldest first.

    `wished_until`: until then the agent goes on sending. `said_at` None: it has not sent anything yet.
    """

    node = models.OneToOneField(Node, on_delete=models.CASCADE, primary_key=True, related_name="log")
    wished_until = models.DateTimeField()
    said_at = models.DateTimeField(null=True)
    cell = models.CharField(max_length=160, blank=True)
    generation = models.IntegerField(default=0)
    logs = models.JSONField(default=dict)

    def __str__(self) -> str:
        return f"logs of {self.node_id}"
