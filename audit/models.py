"""Audit records and their chain. A trigger rejects updates and deletes of records."""

from enum import StrEnum

from django.contrib.postgres.indexes import GinIndex
from django.db import models

ONLY_CHAIN = 1


class Outcome(StrEnum):
    DONE = "done"
    DENIED = "denied"


class Proof(StrEnum):
    SESSION = "session"
    TOKEN = "token"  # noqa: S105 - a word
    JOIN_TOKEN = "join-token"  # noqa: S105 - a word
    COMMAND = "command"
    """An account of the machine on which a command ran."""


class AuditRecord(models.Model):
    """One change or refused attempt. `digest` covers all other columns and the previous digest.

    `object` is the object of the request and `about` all objects of its events, as `noun/key`. `changes` is JSON as
    text, because the digest covers its exact characters, which a JSON column would not keep."""

    number = models.BigIntegerField(primary_key=True)
    at = models.DateTimeField(db_index=True)
    outcome = models.CharField(max_length=8, choices=[(each.value, each.value) for each in Outcome])
    actor = models.CharField(max_length=150)
    proof = models.CharField(max_length=16, choices=[(each.value, each.value) for each in Proof])
    address = models.CharField(max_length=64, blank=True)
    token_prefix = models.CharField(max_length=16, blank=True)
    action = models.CharField(max_length=96)
    object = models.CharField(max_length=250, blank=True)
    about = models.JSONField(default=list)
    reason = models.TextField(blank=True)
    request_id = models.CharField(max_length=64, blank=True)
    changes = models.TextField(default="{}")
    previous = models.CharField(max_length=64)
    digest = models.CharField(max_length=64)

    class Meta:
        ordering = ["-number"]
        indexes = [
            models.Index(fields=["actor", "-number"], name="audit_actor"),
            models.Index(fields=["action", "-number"], name="audit_action"),
            models.Index(fields=["request_id"], name="audit_request"),
            GinIndex(fields=["about"], name="audit_about", opclasses=["jsonb_path_ops"]),
        ]

    def __str__(self) -> str:
        return f"{self.number}: {self.actor} {self.action} {self.object} {self.outcome}"


class AuditChain(models.Model):
    """Both ends of the chain, in one row. `base_…` is the last trimmed record, 0 and zeros if there is none."""

    head_number = models.BigIntegerField(default=0)
    head_digest = models.CharField(max_length=64, default=64 * "0")
    base_number = models.BigIntegerField(default=0)
    base_digest = models.CharField(max_length=64, default=64 * "0")

    def __str__(self) -> str:
        return f"records {self.base_number + 1} to {self.head_number}"


class CapturedRow(models.Model):
    """A row that an audited request or command wrote, stored by a trigger until its record is made (row_capture.py)."""

    capture = models.CharField(max_length=32, db_index=True)
    at = models.DateTimeField()
    table_name = models.CharField(max_length=63)
    operation = models.CharField(max_length=6)
    key = models.JSONField()
    columns = models.JSONField()

    def __str__(self) -> str:
        return f"{self.operation} {self.table_name} {self.key}"


class AuditExport(models.Model):
    target = models.CharField(max_length=500, primary_key=True)
    number = models.BigIntegerField(default=0)
    at = models.DateTimeField()

    def __str__(self) -> str:
        return f"{self.target}: {self.number}"
