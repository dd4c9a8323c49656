"""The request bodies of model versions. Types and ranges are checked here; what values mean is for the services."""

from typing import Any

from rest_framework import serializers

from kernel.rest.serializers import StrictSerializer
from models_registry.planning.adapters import ADAPTERS_MAX, RANKS
from models_registry.planning.engine_arguments import ENGINES
from models_registry.planning.version_checks import GOLDEN_PROMPTS_MAX
from models_registry.planning.version_spec import READY_TIMEOUT_MAX_S

COUNT_MAX = 2**31 - 1
TOKENS_MAX = 10_000_000


class DegreeSerializer(serializers.DictField):
    """Degrees of one instance type; 65,536 ranks are more than any machine of today has."""

    child = serializers.IntegerField(min_value=1, max_value=65_536)


class AskedGoldenPromptSerializer(StrictSerializer):
    prompt = serializers.CharField(max_length=4000, trim_whitespace=False)
    expect = serializers.CharField(max_length=1000, trim_whitespace=False, help_text="What the answer must contain.")


class AskedAdapterSerializer(StrictSerializer):
    name = serializers.CharField(max_length=64, help_text="What clients send as `model`.")
    artifact_uri = serializers.CharField(
        max_length=512, default="", allow_blank=True, help_text="`file:///folder` or `s3://bucket/prefix`."
    )
    artifact_digest = serializers.CharField(
        max_length=80,
        default="",
        allow_blank=True,
        help_text="`sha256:` and the digest of its manifest; left empty, validation computes it.",
    )
    rank = serializers.IntegerField(
        min_value=1, max_value=RANKS[-1], default=None, allow_null=True, help_text="Of its matrices; left out: 16."
    )


class OnTypeSerializer(StrictSerializer):
    """What differs on one instance type. What is left out is as the version says; of another engine, `engine_options`,
    `engine_env`, `speculation`, `quantization` and `roles` are empty."""

    engine = serializers.ChoiceField(choices=ENGINES, required=False)
    artifact_uri = serializers.CharField(
        max_length=512, required=False, help_text="`file:///folder` or `s3://bucket/prefix`."
    )
    artifact_digest = serializers.CharField(
        max_length=80,
        required=False,
        allow_blank=True,
        help_text="`sha256:` and the digest of its manifest; left empty, validation computes it.",
    )
    max_concurrency = serializers.IntegerField(min_value=1, max_value=65_536, required=False)
    ready_timeout_s = serializers.FloatField(min_value=1, max_value=READY_TIMEOUT_MAX_S, required=False)
    engine_options = serializers.DictField(required=False, help_text="Laid over the version's; null takes one away.")
    engine_env = serializers.DictField(
        child=serializers.CharField(allow_blank=True, allow_null=True, max_length=4000, trim_whitespace=False),
        required=False,
        help_text="Laid over the version's; null takes one away.",
    )
    speculation = serializers.DictField(required=False, help_text="In place of the version's; empty: none.")
    quantization = serializers.DictField(required=False, help_text="In place of the version's; empty: none.")
    roles = serializers.DictField(
        child=serializers.DictField(), required=False, help_text="In place of the version's; empty: none."
    )


class ChangeDraftSerializer(StrictSerializer):
    """Whatever is left out stays as it is."""

    engine = serializers.ChoiceField(choices=ENGINES, required=False)
    artifact_uri = serializers.CharField(
        max_length=512, required=False, allow_blank=True, help_text="`file:///folder` or `s3://bucket/prefix`."
    )
    artifact_digest = serializers.CharField(
        max_length=80,
        required=False,
        allow_blank=True,
        help_text="`sha256:` and the digest of its manifest; left empty, validation computes it.",
    )
    context_length = serializers.IntegerField(min_value=1, max_value=TOKENS_MAX, required=False)
    max_concurrency = serializers.IntegerField(min_value=1, max_value=65_536, required=False)
    ready_timeout_s = serializers.FloatField(min_value=1, max_value=READY_TIMEOUT_MAX_S, required=False)
    parallelism = serializers.DictField(
        child=DegreeSerializer(),
        required=False,
        help_text="Instance type -> nodes per cell, and degrees over the whole cell: `tp`, `cp`, `dp`, `pp`.",
    )
    engine_options = serializers.DictField(required=False, help_text="The engine's own options, by name.")
    engine_env = serializers.DictField(
        child=serializers.CharField(allow_blank=True, max_length=4000, trim_whitespace=False),
        required=False,
        help_text="Environment variables of the engine.",
    )
    golden_prompts = serializers.ListField(
        child=AskedGoldenPromptSerializer(), max_length=GOLDEN_PROMPTS_MAX, required=False
    )
    golden_waiver = serializers.CharField(
        max_length=1000,
        required=False,
        allow_blank=True,
        help_text="Why there are no golden prompts, if there are none.",
    )
    attention_heads = serializers.IntegerField(min_value=1, max_value=COUNT_MAX, required=False, allow_null=True)
    kv_heads = serializers.IntegerField(min_value=1, max_value=COUNT_MAX, required=False, allow_null=True)
    layers = serializers.IntegerField(min_value=1, max_value=COUNT_MAX, required=False, allow_null=True)
    speculation = serializers.DictField(
        required=False,
        help_text="`method` (`ngram`, `draft_model`, `medusa`, `eagle`, `eagle3`) and its settings.",
    )
    quantization = serializers.DictField(required=False, help_text="How weights are quantized, in the engine's terms.")
    adapters = serializers.ListField(
        child=AskedAdapterSerializer(),
        max_length=ADAPTERS_MAX,
        required=False,
        help_text="LoRA adapters: `name`, `artifact_uri`, `artifact_digest`, `rank`; each is served under its name.",
    )
    roles = serializers.DictField(
        child=serializers.DictField(),
        required=False,
        help_text="What `prefill` and `decode` cells have otherwise: `parallelism` (instance type -> `tp`), "
        "`engine_options`, `max_concurrency`.",
    )
    by_type = serializers.DictField(
        child=OnTypeSerializer(),
        required=False,
        help_text="Instance type of `parallelism` -> what else differs there: engine, artifact, options and the like.",
    )


class EditDraftSerializer(ChangeDraftSerializer):
    revision = serializers.IntegerField(
        min_value=1, max_value=COUNT_MAX, required=False, help_text="The one you looked at: 409 if there is a newer."
    )

    class Meta:
        examples = {"context_length": 4096, "revision": 1}


class CreateDraftSerializer(ChangeDraftSerializer):
    model = serializers.CharField(max_length=96)
    version = serializers.RegexField(
        r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64, help_text="Letters, digits, `.`, `_` and `-`."
    )
    engine = serializers.ChoiceField(choices=ENGINES, required=False, help_text="Required without `based_on`.")
    based_on = serializers.CharField(
        max_length=170,
        required=False,
        allow_blank=True,
        default="",
        help_text="`model@version`: what is left out is taken from there.",
    )

    class Meta:
        examples = {"version": "2", "based_on": "smollm2@1", "engine_options": {"enforce_eager": False}}

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        if not attrs["based_on"] and "engine" not in attrs:
            raise serializers.ValidationError(
                {"engine": serializers.ErrorDetail("is required, unless the draft is based_on a version", "required")}
            )
        return attrs


class ReasonSerializer(StrictSerializer):
    """A change that cannot be taken back needs a reason."""

    why = serializers.CharField(max_length=200, help_text="Your reason, for the timeline.")
