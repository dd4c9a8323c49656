"""The tables of engine builds and their uploads. The row of a build never changes: another build has another name."""

from typing import Any

from django.core.validators import RegexValidator
from django.db import models

from engine_agent.protocol.engine_builds import EXTERNAL, MOST_FACTS_BYTES, BuildFacts
from engine_agent.protocol.engine_builds import EngineBuild as OrderedBuild
from models_registry.artifacts.planner import parse_place

NAME = r"[a-z0-9][a-z0-9._-]{0,63}"
FACTS = (
    "serves", "version", "platform", "program", "python", "cpu_arch", "cpu_flags", "least_glibc", "least_driver",
    "packed_bytes", "unpacked_bytes", "parts",
)  # fmt: skip
"""Columns that the build itself states in its `build.json`."""


NAMED = RegexValidator(rf"^{NAME}$", "lower-case letters, digits, `.`, `_` and `-`; 64 at most")


class EngineBuild(models.Model):
    """An engine for one platform that agents fetch. `digest` is of its manifest, and so names its content."""

    name = models.CharField(
        max_length=64,
        unique=True,
        validators=[NAMED],
        help_text="Name that versions state, such as `vllm-0.32.0-cpu`.",
    )
    uri = models.CharField(
        max_length=512,
        help_text="`file:///folder` on the control plane's hosts, `s3://bucket/prefix`, or `external://neuron-2.29` "
        "for the environment of that Neuron SDK in machines' images.",
    )
    digest = models.CharField(
        max_length=80, blank=True, help_text="`sha256:` and the digest of its manifest; if empty, it is read there."
    )
    serves = models.CharField(max_length=64, help_text="Engine that it provides: `vllm`, or `generic/NAME`.")
    version = models.CharField(max_length=64, help_text="Version of the engine.")
    platform = models.CharField(max_length=64, help_text="Its target, such as `cpu-avx2` or `cuda13.0`.")
    program = models.CharField(max_length=128, help_text="Program in it that is started.")
    python = models.CharField(max_length=32, help_text="Version of the Python in it.")
    cpu_arch = models.CharField(max_length=16, help_text="Processor architecture: `x86_64` or `aarch64`.")
    cpu_flags = models.JSONField(default=list, blank=True, help_text="Processor features that a host must have.")
    least_glibc = models.CharField(max_length=16, help_text="Oldest glibc of a host.")
    least_driver = models.CharField(
        max_length=16, blank=True, help_text="Oldest NVIDIA driver of a host; empty: none is needed."
    )
    packed_bytes = models.BigIntegerField(help_text="Bytes that an agent fetches.")
    unpacked_bytes = models.BigIntegerField(help_text="Bytes on a node.")
    parts = models.PositiveIntegerField(help_text="Files that its archive is cut into.")
    actor = models.CharField(max_length=64)
    created_at = models.DateTimeField()

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    @property
    def is_external(self) -> bool:
        """Whether machines' images provide it."""
        return self.uri.startswith(EXTERNAL)

    @property
    def facts(self) -> BuildFacts:
        stated: dict[str, Any] = {name: getattr(self, name) for name in FACTS}
        return BuildFacts(**{**stated, "cpu_flags": tuple(self.cpu_flags)})

    def ordered(self) -> OrderedBuild:
        """The build as orders name it."""
        travels = self.is_external or parse_place(self.uri).scheme == "s3"
        uri = self.uri if travels else ""
        return OrderedBuild(self.name, self.digest, uri, self.facts)


class EngineBuildUpload(models.Model):
    """A build that arrives in parts, in order. `facts`: text of its `build.json`. `digests`: SHA-256 of each part.
    `walk`: how far its archive was checked (`planner.ArchiveWalk`)."""

    name = models.CharField(
        max_length=64, unique=True, validators=[NAMED], help_text="Name of the build, once it is complete."
    )
    digest = models.CharField(max_length=80, unique=True, help_text="Digest that the complete build will have.")
    facts = models.TextField(max_length=MOST_FACTS_BYTES, help_text="Text of its `build.json`.")
    digests = models.JSONField(default=list, help_text="SHA-256 of each part in hexadecimal, in order.")
    parts = models.PositiveIntegerField(help_text="Parts of its archive.")
    parts_done = models.PositiveIntegerField(default=0, help_text="Parts that were verified and stored.")
    packed_bytes = models.BigIntegerField(help_text="Bytes of all parts.")
    bytes_done = models.BigIntegerField(default=0, help_text="Bytes that were verified and stored.")
    walk = models.JSONField(default=dict)
    actor = models.CharField(max_length=64)
    created_at = models.DateTimeField()
    touched_at = models.DateTimeField(help_text="When the latest part was stored.")

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return f"upload of {self.name}"
