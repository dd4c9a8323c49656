"""Tables of models, versions and validations of drafts. A version describes how a model is served, and is immutable
once validated."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from django.db import models

from kernel.tones import Tone
from models_registry.versions.planning.lifecycle import (
    VALIDATION_TONE,
    VERSION_TONE,
    ValidationState,
    VersionState,
    choices,
)
from models_registry.versions.planning.spec import HeadCounts, VersionSpec, adapter_names

__all__ = ["CheckpointRecord", "EngineAllowance", "Model", "ModelVersion", "Validation", "VersionState"]

NO_ALLOWANCES: Mapping[str, Sequence[str]] = MappingProxyType({})


class Model(models.Model):
    """A model under the name that applications request."""

    name = models.SlugField(max_length=96, primary_key=True)
    description = models.TextField(blank=True)
    created_at = models.DateTimeField()

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class ModelVersion(models.Model):
    """One way to serve a model. `revision` increases with every change, for compare-and-set.

    `parallelism` maps instance type -> {"nodes": n, "tp": t, …} (see `models_registry.versions.planning.machines`).
    `engine_build` names the engine build that its nodes fetch; empty: what is installed there. `engine_options` has the
    engine's options by name. `golden_prompts` is a list of {"prompt", "expect"};
    `golden_waiver` says why it is empty. `attention_heads`, `kv_heads` and `layers` are those of the model, against
    which degrees are checked; null is unknown. `speculation`, `quantization`, `adapters` (list of objects) and `roles`
    (role -> object) are read in `models_registry.versions.planning`. `by_type` maps instance type -> fields that differ
    there (`models_registry.versions.planning.spec.BY_TYPE`). `reason` explains the state; `state_since` null: since it
    was created."""

    model = models.ForeignKey(Model, on_delete=models.PROTECT, related_name="versions")
    version = models.CharField(max_length=64)
    state = models.CharField(max_length=16, choices=choices(VersionState), default=VersionState.DRAFT.value)
    reason = models.TextField(blank=True)
    engine = models.CharField(max_length=32)
    engine_build = models.CharField(max_length=64, blank=True)
    artifact_uri = models.CharField(max_length=512, blank=True)
    artifact_digest = models.CharField(max_length=80, blank=True)
    context_length = models.PositiveIntegerField(default=2048)
    max_concurrency = models.PositiveIntegerField(default=16)
    ready_timeout_s = models.FloatField(default=300.0)
    parallelism = models.JSONField(default=dict)
    engine_options = models.JSONField(default=dict, blank=True)
    engine_env = models.JSONField(default=dict, blank=True)
    golden_prompts = models.JSONField(default=list, blank=True)
    golden_waiver = models.TextField(blank=True)
    attention_heads = models.PositiveIntegerField(null=True, blank=True)
    kv_heads = models.PositiveIntegerField(null=True, blank=True)
    layers = models.PositiveIntegerField(null=True, blank=True)
    speculation = models.JSONField(default=dict, blank=True)
    quantization = models.JSONField(default=dict, blank=True)
    adapters = models.JSONField(default=list, blank=True)
    roles = models.JSONField(default=dict, blank=True)
    by_type = models.JSONField(default=dict, blank=True)
    modalities = models.JSONField(default=list, blank=True)
    revision = models.PositiveIntegerField(default=1)
    created_at = models.DateTimeField()
    state_since = models.DateTimeField(null=True)

    class Meta:
        ordering = ["model_id", "-id"]
        constraints = [models.UniqueConstraint(fields=["model", "version"], name="version_once_per_model")]

    def __str__(self) -> str:
        return self.reference

    @property
    def reference(self) -> str:
        """Its name on screens and in the API: `model@version`."""
        return f"{self.model_id}@{self.version}"

    @property
    def adapter_names(self) -> tuple[str, ...]:
        return adapter_names(self.adapters)

    @property
    def tone(self) -> Tone:
        return VERSION_TONE[VersionState(self.state)]

    def spec(self, allowances: Mapping[str, Sequence[str]] = NO_ALLOWANCES) -> VersionSpec:
        """The row as planner input. `allowances`: what admins allow, by engine (`engine_allowances`)."""
        return VersionSpec(
            model=self.model_id,
            version=self.version,
            engine=self.engine,
            engine_build=self.engine_build,
            artifact_uri=self.artifact_uri,
            artifact_digest=self.artifact_digest,
            context_length=self.context_length,
            max_concurrency=self.max_concurrency,
            ready_timeout_s=self.ready_timeout_s,
            parallelism=self.parallelism,
            engine_options=self.engine_options,
            engine_env=self.engine_env,
            golden_prompts=tuple((item["prompt"], item["expect"]) for item in self.golden_prompts),
            golden_waiver=self.golden_waiver,
            heads=HeadCounts(attention=self.attention_heads, kv=self.kv_heads, layers=self.layers),
            speculation=self.speculation,
            quantization=self.quantization,
            adapters=tuple(self.adapters),
            roles=self.roles,
            by_type=self.by_type,
            allowances=dict(allowances),
            modalities=tuple(self.modalities),
        )


class EngineAllowance(models.Model):
    """An option (`--trust-remote-code`) or variable (`LD_PRELOAD`) that an admin allows an engine in addition to the
    lists in `engine_agent.protocol.engine_options`."""

    engine = models.CharField(max_length=32)
    name = models.CharField(max_length=128)
    why = models.CharField(max_length=200)
    actor = models.CharField(max_length=64)
    created_at = models.DateTimeField()

    class Meta:
        ordering = ["engine", "name"]
        constraints = [models.UniqueConstraint(fields=["engine", "name"], name="engine_allowance_once")]

    def __str__(self) -> str:
        return f"{self.name} for {self.engine}"


class Validation(models.Model):
    """One validation of a draft; at most one per version is running.

    `version_revision` is that of the validated draft. While it runs, `checked` has the digests of the files read so far
    (artifact URI -> path -> hexadecimal SHA-256), so that a crash repeats only one file. `troubles` counts failures of
    sources. `evidence` has the results once it has passed."""

    version = models.ForeignKey(ModelVersion, on_delete=models.CASCADE, related_name="validations")
    version_revision = models.PositiveIntegerField()
    state = models.CharField(max_length=16, choices=choices(ValidationState), default=ValidationState.RUNNING.value)
    reason = models.TextField(blank=True)
    actor = models.CharField(max_length=64)
    files_total = models.PositiveIntegerField(default=0)
    files_done = models.PositiveIntegerField(default=0)
    bytes_total = models.BigIntegerField(default=0)
    bytes_done = models.BigIntegerField(default=0)
    checked = models.JSONField(default=dict, blank=True)
    troubles = models.PositiveIntegerField(default=0)
    evidence = models.JSONField(default=dict, blank=True)
    started_at = models.DateTimeField()
    seen_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["version"],
                condition=models.Q(state=ValidationState.RUNNING.value),
                name="validation_running_once",
            ),
        ]

    def __str__(self) -> str:
        return f"validation {self.pk} of {self.version}"

    @property
    def tone(self) -> Tone:
        return VALIDATION_TONE[ValidationState(self.state)]

    @property
    def percent(self) -> float:
        """Share of the artifacts that was read, in percent; 0 while the total is unknown."""
        return 100.0 * self.bytes_done / self.bytes_total if self.bytes_total else 0.0


class CheckpointRecord(models.Model):
    """What validation read in an artifact: dimensions and sizes of tensors (`planning.checkpoint.Checkpoint`), or the
    `problem` that prevents the arithmetic of its memory. An artifact never changes, so neither does a row, which is
    deleted if a file turns out to be corrupt."""

    uri = models.CharField(max_length=512)
    digest = models.CharField(max_length=80)
    facts = models.JSONField(default=dict, blank=True)
    problem = models.TextField(blank=True)
    read_at = models.DateTimeField()

    class Meta:
        ordering = ["-id"]
        constraints = [models.UniqueConstraint(fields=["uri", "digest"], name="checkpoint_once_per_artifact")]

    def __str__(self) -> str:
        return f"checkpoint {self.uri}"


# Calibrations of what versions guess. The database rejects changes; the newest of a version counts.


class SpeculationCalibration(models.Model):
    """How often the guesses of a version's heads are right, and how many tokens it should guess.

    `document` is the trainer's output, `step_costs` has step costs by instance type
    (`models_registry.speculation.planner`). `figures` (by task) and `choices` (by task and instance type) follow from
    them."""

    version = models.ForeignKey(ModelVersion, on_delete=models.CASCADE, related_name="calibrations")
    document = models.JSONField()
    step_costs = models.JSONField(default=list, blank=True)
    figures = models.JSONField()
    choices = models.JSONField(default=list, blank=True)
    actor = models.CharField(max_length=64)
    created_at = models.DateTimeField()

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"calibration {self.pk} of {self.version}"
