"""Tables that every app uses: events, leases, passes of loops, hosts, recorded changes, answers of repeated POSTs."""

from typing import TYPE_CHECKING, Any

from django.db import models

from kernel.tones import Tone

if TYPE_CHECKING:
    _Field = models.Field[Any, Any]
else:
    _Field = models.Field  # has no type parameters while it runs


class Event(models.Model):
    """An event, written in the transaction of its change. The timeline of every page."""

    at = models.DateTimeField(db_index=True)
    kind = models.CharField(max_length=64, db_index=True)
    tone = models.CharField(max_length=8, choices=[(tone.value, tone.value) for tone in Tone], default=Tone.IDLE)
    message = models.TextField()
    actor = models.CharField(max_length=64, default="switchyard")
    region = models.CharField(max_length=64, blank=True)
    deployment = models.CharField(max_length=128, blank=True)
    cell = models.CharField(max_length=160, blank=True)
    node = models.CharField(max_length=64, blank=True)
    detail = models.JSONField(default=dict, blank=True)

    class Meta:
        ordering = ["-id"]
        indexes = [
            models.Index(fields=["cell", "-id"], name="event_cell"),
            models.Index(fields=["node", "-id"], name="event_node"),
            models.Index(fields=["deployment", "-id"], name="event_deployment"),
        ]

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


class Lease(models.Model):
    """An exclusive right until `expires_at`. `token` is a fencing token, which grows with every change of holder."""

    name = models.CharField(max_length=96, primary_key=True)
    holder = models.CharField(max_length=96)
    token = models.BigIntegerField(default=1)
    acquired_at = models.DateTimeField()
    renewed_at = models.DateTimeField()
    expires_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"{self.name} held by {self.holder} until {self.expires_at:%H:%M:%S}"


class LoopPass(models.Model):
    """The last complete pass of a control loop, by PostgreSQL's clock (kernel.loop_passes). `waited_s`: the time that
    its message waited."""

    loop = models.CharField(max_length=64, primary_key=True)
    holder = models.CharField(max_length=96)
    passed_at = models.DateTimeField()
    took_s = models.FloatField(default=0.0)
    waited_s = models.FloatField(default=0.0)

    def __str__(self) -> str:
        return f"{self.loop} passed at {self.passed_at:%H:%M:%S}"


class ControlHost(models.Model):
    """A host on which a web process of this control plane runs, and when it last reported (kernel.control_hosts)."""

    name = models.CharField(max_length=64, primary_key=True)
    seen_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"{self.name} at {self.seen_at:%H:%M:%S}"


class TransactionIdField(_Field):
    """PostgreSQL's `xid8`: the unique id of a transaction. Only SQL compares it."""

    def db_type(self, connection: Any) -> str:
        return "xid8"


class Change(models.Model):
    """A change of a watched object, written by triggers in its transaction (kernel.change_triggers).

    `thing`: primary key as text; `key`: its key in the API, or "" if only the row has it."""

    kind = models.CharField(max_length=32)
    thing = models.TextField()
    key = models.TextField()
    xid = TransactionIdField()
    at = models.DateTimeField(db_index=True)

    class Meta:
        indexes = [
            models.Index(fields=["kind", "xid"], name="change_kind_xid"),
            models.Index(fields=["xid"], name="change_xid"),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.key or self.thing}"


class ChangeHorizon(models.Model):
    """One row: changes of transactions up to `xid` may have been deleted."""

    xid = TransactionIdField()

    def __str__(self) -> str:
        return f"changes after {self.xid}"


class IdempotentAnswer(models.Model):
    """The answer to a POST with an `Idempotency-Key`. `body` is NULL if it had a secret."""

    caller = models.CharField(max_length=64)
    key = models.CharField(max_length=255)
    fingerprint = models.CharField(max_length=64)
    status = models.PositiveIntegerField()
    body = models.BinaryField(null=True)
    created_at = models.DateTimeField()
    expires_at = models.DateTimeField(db_index=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["caller", "key"], name="idempotent_answer_once")]

    def __str__(self) -> str:
        return f"{self.key} of {self.caller}"
