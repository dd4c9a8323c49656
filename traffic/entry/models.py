"""Which region's entry clients reach: what operators planned, and every set of weights that was published."""

from django.db import models

from fleet.reconcile.planning.states import choices
from fleet.regions.models import Region
from traffic.entry.planner import RevisionState, Target


class Entry(models.Model):
    """The DNS name by which clients reach all regions.

    `shares`: region -> share of the clients, as planned; regions that are not named have 1.0. `revision` grows with
    every change of them, and is what changes compare and set. `held`: why what stands there is not what is wanted.
    `seen`: the fingerprint of what was read last, and `adopted`: of what an operator let us replace though it is not
    ours.
    """

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
    """One attempt to publish weights, written before its call. `token` is in the text that it writes, and in no other:
    by it a lost answer is found. `records`: as they were sent. `change_id`: Route 53's; "" while its answer is not
    known."""

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
    """What a load balancer was told about an ingress, which may be no more: an address alone says nothing, it is used
    again. `deregistered_at`: since when it gets nothing new."""

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
        """The row as the planner takes it."""
        return Target(self.ingress, self.group, self.address, self.port, draining=self.deregistered_at is not None)
