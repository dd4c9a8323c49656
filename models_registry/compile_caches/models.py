"""The table of compile caches that engines share."""

from django.db import models

from models_registry.versions.models import ModelVersion


class CompileCache(models.Model):
    """What one rank of a version compiled on one instance type. A row never changes but for its use.

    `key` is the agent's: a digest of everything else that compiled code depends on."""

    version = models.ForeignKey(ModelVersion, on_delete=models.CASCADE, related_name="compile_caches")
    instance_type = models.CharField(max_length=64, help_text="Instance type that it was compiled on.")
    rank = models.PositiveIntegerField(help_text="Rank of the cell whose engine compiled it.")
    key = models.CharField(
        max_length=64, help_text="Digest of engine, drivers, devices, processor, arguments and paths, by the agent."
    )
    digest = models.CharField(max_length=80, help_text="`sha256:` and the digest of its archive.")
    packed_bytes = models.BigIntegerField(help_text="Bytes that a node fetches.")
    unpacked_bytes = models.BigIntegerField(help_text="Bytes on a node.")
    node = models.CharField(max_length=64, help_text="Node whose engine compiled it.")
    cell = models.CharField(max_length=128, help_text="Its cell at that time.")
    uses = models.PositiveIntegerField(default=0, help_text="How often nodes fetched it.")
    used_at = models.DateTimeField(help_text="When a node fetched it last, or when it was compiled.")
    created_at = models.DateTimeField()

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["version", "instance_type", "rank", "key"], name="compile_cache_once_per_key"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.version} rank {self.rank} on {self.instance_type}"
