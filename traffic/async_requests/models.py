"""Near-real-time requests and their outcomes, and request queues with their refused messages."""

import secrets

from django.db import models
from django.db.models import Q

from fleet.reconcile.planning.states import choices
from fleet.regions.models import Region
from kernel.fields import IdField
from traffic.async_requests.planner import OPEN, AsyncState, QueueAddress, QueueState
from traffic.async_requests.planning.kafka import KafkaSecurity, QueueKind, SaslMechanism
from traffic.keys.models import ApplicationKey

OPEN_STATES = sorted(state.value for state in OPEN)


def new_id() -> str:
    """128 random bits, so that IDs cannot be guessed."""
    return f"ar_{secrets.token_hex(16)}"


def new_callback_secret() -> str:
    return secrets.token_hex(32)


class AsyncRequest(models.Model):
    """One accepted request. `attempts` counts leases and fences senders that lost theirs; `failures` counts attempts
    that an engine may have started. `body` is emptied when the request ends. `body_at` and `answer_at`: where the bytes
    are, if in the file store (`services/body_groups.py`). `results_to`: the queue whose results topic gets the outcome,
    at `published_at`, with the key and position in `origin`. `sink` also gets it, in the group `delivery`
    (`batch_sinks/services/request_groups.py`).

    Each request is written three times (accepted, leased, ended), and each index adds to all of them. So the foreign
    keys have none, and all others except two cover only open or only ended requests."""

    id = IdField(max_length=40, primary_key=True, default=new_id)
    tenant = models.CharField(max_length=64, blank=True)
    key = models.CharField(max_length=16, blank=True)
    region = models.ForeignKey(Region, on_delete=models.PROTECT, related_name="async_requests", db_index=False)
    path = models.CharField(max_length=64)
    model = models.CharField(max_length=200)
    serving_class = models.CharField(max_length=16)
    max_concurrent = models.PositiveIntegerField(default=0)
    body = models.BinaryField(default=bytes)
    body_at = models.CharField(max_length=120, blank=True)
    digest = models.CharField(max_length=64)
    idempotency_key = models.CharField(max_length=128, blank=True)
    callback_url = models.CharField(max_length=500, blank=True)
    callback_secret = models.CharField(max_length=128, blank=True)
    state = models.CharField(max_length=16, choices=choices(AsyncState), default=AsyncState.QUEUED.value)
    attempts = models.PositiveIntegerField(default=0)
    failures = models.PositiveIntegerField(default=0)
    leased_until = models.DateTimeField(null=True)
    due_at = models.DateTimeField()
    deadline_at = models.DateTimeField()
    created_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True)
    status = models.PositiveIntegerField(null=True)
    answer = models.BinaryField(null=True)
    answer_at = models.CharField(max_length=120, blank=True)
    reason = models.TextField(blank=True)
    results_to = models.ForeignKey(
        "RequestQueue", on_delete=models.SET_NULL, null=True, related_name="outcomes", db_index=False
    )
    origin = models.JSONField(default=dict)
    published_at = models.DateTimeField(null=True)
    sink = models.ForeignKey("BatchSink", on_delete=models.SET_NULL, null=True, related_name="requests", db_index=False)
    delivery = models.ForeignKey(
        "BatchDelivery", on_delete=models.SET_NULL, null=True, related_name="requests", db_index=False
    )

    class Meta:
        ordering = ["-created_at"]
        indexes = [
            models.Index(fields=["tenant", "due_at", "id"], name="async_turn", condition=Q(ended_at=None)),
            models.Index(fields=["tenant"], name="async_sending", condition=Q(state=AsyncState.SENDING.value)),
            models.Index(
                fields=["results_to", "ended_at"],
                name="async_unpublished",
                condition=Q(ended_at__isnull=False, published_at=None, results_to__isnull=False),
            ),
            models.Index(
                fields=["sink", "ended_at"], name="async_ungrouped", condition=Q(sink__isnull=False, delivery=None)
            ),
            models.Index(fields=["delivery"], name="async_of_delivery", condition=Q(delivery__isnull=False)),
            models.Index(fields=["deadline_at"], name="async_deadline", condition=Q(ended_at=None)),
            models.Index(fields=["tenant", "created_at"], name="async_of_tenant"),
            models.Index(fields=["ended_at"], name="async_ended", condition=Q(ended_at__isnull=False)),
        ]
        constraints = [
            models.UniqueConstraint(
                fields=["tenant", "idempotency_key"], name="async_once", condition=~Q(idempotency_key="")
            ),
            models.CheckConstraint(condition=Q(state__in=OPEN_STATES, ended_at=None)
                                   | (~Q(state__in=OPEN_STATES) & Q(ended_at__isnull=False)),
                                   name="async_ends_once"),
            models.CheckConstraint(condition=Q(answer=None, answer_at="") | Q(state__in=[AsyncState.DONE.value,
                                                                           AsyncState.FAILED.value]),
                                   name="async_answer_of_outcome"),
        ]  # fmt: skip

    def __str__(self) -> str:
        return f"{self.id}: {self.state}"


# Queues whose messages become near-real-time requests, and messages that could not.


class RequestQueue(models.Model):
    """A queue of SQS or a topic of Kafka that senders read. Its messages are requests of `key` and its tenant, whatever
    they contain. `read_at`: the last successful receive, or the last time none was needed. `waiting`: approximate
    number of messages, null if unknown. `reason`: why it is not read, or empty.

    `name` is the queue's or the topic's. AWS region and account are those of SQS; the columns below `waiting` are
    Kafka's. `sealed_password` is encrypted for these brokers and this user."""

    url = models.CharField(max_length=500, unique=True)
    kind = models.CharField(max_length=8, choices=choices(QueueKind), default=QueueKind.SQS.value)
    aws_region = models.CharField(max_length=32, blank=True)
    account = models.CharField(max_length=12, blank=True)
    name = models.CharField(max_length=80)
    key = models.ForeignKey(ApplicationKey, on_delete=models.PROTECT, related_name="request_queues")
    actor = models.CharField(max_length=64)
    created_at = models.DateTimeField()
    state = models.CharField(max_length=16, choices=choices(QueueState), default=QueueState.NEW.value)
    reason = models.TextField(blank=True)
    read_at = models.DateTimeField(null=True)
    waiting = models.PositiveBigIntegerField(null=True)
    group = models.CharField(max_length=128, blank=True)
    results_topic = models.CharField(max_length=80, blank=True)
    dead_letter_topic = models.CharField(max_length=80, blank=True)
    security = models.CharField(max_length=16, choices=choices(KafkaSecurity), blank=True)
    mechanism = models.CharField(max_length=16, choices=choices(SaslMechanism), blank=True)
    username = models.CharField(max_length=256, blank=True)
    sealed_password = models.TextField(blank=True)
    ca_pem = models.TextField(blank=True)

    class Meta:
        ordering = ["name", "id"]

    def __str__(self) -> str:
        return self.name

    @property
    def brokers(self) -> str:
        """Addresses of Kafka's brokers, with commas."""
        return self.url.removeprefix("kafka://").partition("/")[0]

    def address(self) -> QueueAddress:
        """The address of a queue of SQS."""
        return QueueAddress(self.url, self.aws_region, self.account, self.name)


class RefusedMessage(models.Model):
    """A message left for the dead-letter queue, one row per message. `at` is its first receive."""

    queue = models.ForeignKey(RequestQueue, on_delete=models.CASCADE, related_name="refused")
    message = models.CharField(max_length=100)
    reason = models.TextField()
    at = models.DateTimeField(db_index=True)

    class Meta:
        ordering = ["-at", "-id"]
        constraints = [models.UniqueConstraint(fields=["queue", "message"], name="refused_message_once")]

    def __str__(self) -> str:
        return f"{self.message}: {self.reason}"
