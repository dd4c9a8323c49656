"""The DNS entry with operators' planned shares, every published set of weights, and load balancer targets."""

from django.db import models

from fleet.reconcile.planning.states import choices
from fleet.regions.models import Region
from traffic.entry.planner import RevisionState, Target


class Entry(models.Model):
    """The DNS name that brings clients to all regions. `shares` maps a region to its planned share of clients (default
    1.0); `revision` is for compare-and-set. `held`: why the records are not as wanted, or empty. `seen` is the
    fingerprint of the records at the last read, `adopted` that of foreign records that an operator allowed to
    replace."""

    name = models.CharField(max_length=255, primary_key=True)
    shares = models.JSONField(default=dict, blank=True)
    revision = models.PositiveIntegerField(default=0)
    actor = models.CharField(max_length=64, blank=True)
    changed_at = models.DateTimeField(null=True)
    held = models.TextField(blank=True)
    held_since = models.DateTimeField(null=True)
    seen = models.CharField(max_length=16, blank=True)
    seen_weights = models.JSONField(default=dict, blank=True)
    adopted = models.CharField(max_length=16, blank=True)
    looked_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class EntryRevision(models.Model):
    """One attempt to publish weights, written before its call. `token` is part of the published text record and unique
    to it, so a lost response can be resolved. `records` are as sent. `change_id` is Route 53's, empty until its
    response."""

    entry = models.ForeignKey(Entry, on_delete=models.CASCADE, related_name="revisions")
    revision = models.PositiveBigIntegerField()
    token = models.CharField(max_length=32, unique=True)
    weights = models.JSONField()
    records = models.JSONField()
    state = models.CharField(max_length=16, choices=choices(RevisionState))
    change_id = models.CharField(max_length=64, blank=True)
    reason = models.TextField()
    trouble = models.TextField(blank=True)
    at = models.DateTimeField()
    settled_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-id"]
        constraints = [models.UniqueConstraint(fields=["entry", "revision"], name="entry_revision_once")]

    def __str__(self) -> str:
        return f"{self.entry_id} revision {self.revision}"


class EntryTarget(models.Model):
    """A registration of an ingress in a target group; the ingress may be deleted. Addresses are reused and so do not
    identify it. `deregistered_at`: since when it gets no new connections."""

    ingress = models.CharField(max_length=64)
    region = models.ForeignKey(Region, on_delete=models.CASCADE, related_name="+")
    group = models.CharField(max_length=255)
    address = models.CharField(max_length=64)
    port = models.PositiveIntegerField()
    registered_at = models.DateTimeField()
    deregistered_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["region_id", "ingress", "group"]
        constraints = [models.UniqueConstraint(fields=["ingress", "group"], name="entry_target_once")]

    def __str__(self) -> str:
        return f"{self.ingress} at {self.address}:{self.port}"

    def view(self) -> Target:
        return Target(self.ingress, self.group, self.address, self.port, draining=self.deregistered_at is not None)
