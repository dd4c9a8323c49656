"""Tables of imports: models that are fetched from a hub into the artifact store, and their files."""

from django.db import models

from kernel.tones import Tone
from models_registry.artifacts.planner import size_words
from models_registry.imports.planner import IMPORT_TONE, ImportState, Repository, parse_source
from models_registry.versions.planning.lifecycle import choices


class ModelImport(models.Model):
    """One fetch of a repository at one commit. `fence` counts its leases: only the newest may write. `due_at`: next
    claim; while it runs, the end of the lease. `troubles`: failures in a row without progress. `is_staged`: it may have
    unfinished files."""

    source = models.CharField(
        max_length=330, help_text="`hf://ORG/NAME@REVISION` or `modelscope://ORG/NAME@REVISION`. Default: main branch."
    )
    pattern = models.CharField(
        max_length=200,
        blank=True,
        default="",
        help_text="Glob for the weights, such as `*Q4_K_M.gguf`. Default: safetensors, or the only GGUF.",
    )
    draft = models.CharField(
        max_length=161, blank=True, default="", help_text="`model@version` to draft from it, once it is done."
    )
    engine = models.CharField(
        max_length=32,
        blank=True,
        default="",
        help_text="Engine of the draft. Default: llama-cpp for a GGUF, else vllm.",
    )
    state = models.CharField(
        max_length=16, choices=choices(ImportState), default=ImportState.QUEUED.value, help_text="State of the import."
    )
    reason = models.TextField(blank=True, help_text="Progress, or why it ended.")
    revision = models.CharField(max_length=128, blank=True, help_text="Commit that REVISION named at the start.")
    license = models.CharField(max_length=64, blank=True, help_text="Licence that the repository states.")
    tags = models.JSONField(default=list, blank=True, help_text="Tags of the repository.")
    configuration = models.JSONField(default=dict, blank=True, help_text="Numbers from `config.json`.")
    artifact_uri = models.CharField(max_length=512, blank=True, help_text="Where the artifact is, once it is done.")
    artifact_digest = models.CharField(max_length=80, blank=True, help_text="Digest of the artifact.")
    files_total = models.PositiveIntegerField(default=0, help_text="Files to fetch.")
    files_done = models.PositiveIntegerField(default=0, help_text="Files that were verified and stored.")
    bytes_total = models.BigIntegerField(default=0, help_text="Bytes to fetch.")
    bytes_done = models.BigIntegerField(default=0, help_text="Bytes fetched.")
    bytes_per_s = models.FloatField(default=0, help_text="Present rate.")
    troubles = models.PositiveIntegerField(default=0)
    fence = models.PositiveIntegerField(default=0)
    is_staged = models.BooleanField(default=False)
    actor = models.CharField(max_length=64)
    created_at = models.DateTimeField()
    due_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-id"]
        indexes = [
            models.Index(
                fields=["due_at"],
                name="import_due",
                condition=models.Q(state__in=[ImportState.QUEUED.value, ImportState.RUNNING.value]),
            )
        ]

    def __str__(self) -> str:
        return f"import {self.pk} of {self.source}"

    @property
    def tone(self) -> Tone:
        return IMPORT_TONE[ImportState(self.state)]

    @property
    def percent(self) -> float:
        return 100.0 * self.bytes_done / self.bytes_total if self.bytes_total else 0.0

    @property
    def size(self) -> str:
        return size_words(self.bytes_total)

    @property
    def fetched(self) -> str:
        return size_words(self.bytes_done)

    def repository(self) -> Repository:
        return parse_source(self.source)


class ImportFile(models.Model):
    """A file to fetch, as the hub lists it. `stored`: hexadecimal SHA-256 of the stored content; empty: not yet."""

    model_import = models.ForeignKey(ModelImport, on_delete=models.CASCADE, related_name="files")
    path = models.CharField(max_length=1024)
    size = models.BigIntegerField()
    sha256 = models.CharField(max_length=64, blank=True)
    blob = models.CharField(max_length=64, blank=True)
    revision = models.CharField(max_length=64, blank=True)
    stored = models.CharField(max_length=64, blank=True)

    class Meta:
        ordering = ["model_import_id", "path"]
        constraints = [models.UniqueConstraint(fields=["model_import", "path"], name="import_file_once")]

    def __str__(self) -> str:
        return self.path
