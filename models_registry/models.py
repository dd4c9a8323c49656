"""Models and their versions. A version is an immutable description of how a model is served."""

from django.db import models

from models_registry.planning.versions import HeadCounts, VersionSpec


class VersionState(models.TextChoices):
    DRAFT = "draft", "Draft"
    VALIDATED = "validated", "Validated"
    RELEASED = "released", "Released"
    RETIRED = "retired", "Retired"


class Model(models.Model):
    """Something that answers prompts, under the name that applications ask for."""

    name = models.SlugField(max_length=96, primary_key=True)
    description = models.TextField(blank=True)
    created_at = models.DateTimeField()

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class ModelVersion(models.Model):
    """One immutable way to serve a model.

    `parallelism` maps instance type -> {"nodes": n, "tp": t, …} (see `models_registry.planning.parallelism`);
    `engine_options` holds the engine's own options by name; `golden_prompts` is a list of {"prompt", "expect"}.
    `attention_heads`, `kv_heads` and `layers` are the model's own and let degrees be checked; null is unknown.
    `speculation` and `quantization` are read by the modules of these names in `models_registry.planning`.
    """

    model = models.ForeignKey(Model, on_delete=models.PROTECT, related_name="versions")
    version = models.CharField(max_length=64)
    state = models.CharField(max_length=16, choices=VersionState.choices, default=VersionState.DRAFT)
    engine = models.CharField(max_length=32)
    artifact_uri = models.CharField(max_length=512, blank=True)
    artifact_digest = models.CharField(max_length=80, blank=True)
    context_length = models.PositiveIntegerField(default=2048)
    max_concurrency = models.PositiveIntegerField(default=16)
    ready_timeout_s = models.FloatField(default=300.0)
    parallelism = models.JSONField(default=dict)
    engine_options = models.JSONField(default=dict, blank=True)
    engine_env = models.JSONField(default=dict, blank=True)
    golden_prompts = models.JSONField(default=list, blank=True)
    attention_heads = models.PositiveIntegerField(null=True, blank=True)
    kv_heads = models.PositiveIntegerField(null=True, blank=True)
    layers = models.PositiveIntegerField(null=True, blank=True)
    speculation = models.JSONField(default=dict, blank=True)
    quantization = models.JSONField(default=dict, blank=True)
    created_at = models.DateTimeField()

    class Meta:
        ordering = ["model_id", "-id"]
        constraints = [models.UniqueConstraint(fields=["model", "version"], name="version_once_per_model")]

    def __str__(self) -> str:
        return self.reference

    @property
    def reference(self) -> str:
        """Name by which people and the API speak of it: `model@version`."""
        return f"{self.model_id}@{self.version}"

    def spec(self) -> VersionSpec:
        """The row as the pure planners take it."""
        return VersionSpec(
            model=self.model_id,
            version=self.version,
            engine=self.engine,
            artifact_uri=self.artifact_uri,
            artifact_digest=self.artifact_digest,
            context_length=self.context_length,
            max_concurrency=self.max_concurrency,
            ready_timeout_s=self.ready_timeout_s,
            parallelism=self.parallelism,
            engine_options=self.engine_options,
            engine_env=self.engine_env,
            golden_prompts=tuple((item["prompt"], item["expect"]) for item in self.golden_prompts),
            heads=HeadCounts(attention=self.attention_heads, kv=self.kv_heads, layers=self.layers),
            speculation=self.speculation,
            quantization=self.quantization,
        )
