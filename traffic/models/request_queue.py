"""Queues of SQS whose messages become near-real-time requests, and messages of theirs that could not."""

from django.db import models

from fleet.planning.states import choices
from traffic.models.key import ApplicationKey
from traffic.planning.request_queue import QueueAddress, QueueState


class RequestQueue(models.Model):
    """A queue that the senders read. Its messages are requests of `key` and of its tenant, whatever they say.

    `read_at`: when one last answered a receive, or needed none. `waiting`: about how many messages it has, null until
    that is known.
    `reason`: why it is not read; empty while it is.
    """

    url = models.CharField(max_length=200, unique=True)
    aws_region = models.CharField(max_length=32)
    account = models.CharField(max_length=12)
    name = models.CharField(max_length=80)
    key = models.ForeignKey(ApplicationKey, on_delete=models.PROTECT, related_name="request_queues")
    actor = models.CharField(max_length=64)
    created_at = models.DateTimeField()
    state = models.CharField(max_length=16, choices=choices(QueueState), default=QueueState.NEW.value)
    reason = models.TextField(blank=True)
    read_at = models.DateTimeField(null=True)
    waiting = models.PositiveBigIntegerField(null=True)

    class Meta:
        ordering = ["name", "id"]

    def __str__(self) -> str:
        return self.name

    def address(self) -> QueueAddress:
        return QueueAddress(self.url, self.aws_region, self.account, self.name)


class RefusedMessage(models.Model):
    """A message that is left for the queue's dead letters, once, however often it came. `at`: when it came first."""

    queue = models.ForeignKey(RequestQueue, on_delete=models.CASCADE, related_name="refused")
    message = models.CharField(max_length=100)
    reason = models.TextField()
    at = models.DateTimeField(db_index=True)

    class Meta:
        ordering = ["-at", "-id"]
        constraints = [models.UniqueConstraint(fields=["queue", "message"], name="refused_message_once")]

    def __str__(self) -> str:
        return f"{self.message}: {self.reason}"
