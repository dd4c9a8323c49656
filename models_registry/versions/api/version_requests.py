"""Request bodies of model versions, and the API of engine allowances. Checks types and ranges only; services check what
values mean."""

from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from accounts.api.approvals import ApprovalSerializer, waiting
from accounts.models import Approval
from engine_agent.protocol.request_bodies import Modality
from kernel import clock
from kernel.access import Role
from kernel.rest.serializers import StrictSerializer, actor_of, body_of
from kernel.rest.view_sets import GenericViewSet, ListModelMixin
from models_registry.versions.models import EngineAllowance
from models_registry.versions.planning.engine_arguments import ENGINES
from models_registry.versions.planning.lifecycle import GOLDEN_PROMPTS_MAX
from models_registry.versions.planning.spec import ADAPTERS_MAX, RANKS, READY_TIMEOUT_MAX_S
from models_registry.versions.services.drafts import engine_allowance_request, engine_allowance_withdraw

COUNT_MAX = 2**31 - 1
TOKENS_MAX = 10_000_000
BUILD_HELP = "Engine build that nodes fetch; empty: the engine that is installed on them."


class DegreeSerializer(serializers.DictField):
    """Degrees on one instance type; 65,536 ranks are more than any current machine has."""

    child = serializers.IntegerField(min_value=1, max_value=65_536)


class AskedGoldenPromptSerializer(StrictSerializer):
    prompt = serializers.CharField(max_length=4000, trim_whitespace=False)
    expect = serializers.CharField(
        max_length=1000, trim_whitespace=False, help_text="Text that the answer must contain."
    )


class AskedAdapterSerializer(StrictSerializer):
    name = serializers.CharField(max_length=64, help_text="The `model` in requests.")
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
        min_value=1, max_value=RANKS[-1], default=None, allow_null=True, help_text="Rank of its matrices; default: 16."
    )


class OnTypeSerializer(StrictSerializer):
    """Fields that differ on one instance type; others are as in the version. If the engine differs, `engine_options`,
    `engine_env`, `speculation`, `quantization` and `roles` start empty."""

    engine = serializers.ChoiceField(choices=ENGINES, required=False)
    engine_build = serializers.CharField(max_length=64, required=False, allow_blank=True, help_text=BUILD_HELP)
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
    engine_options = serializers.DictField(
        required=False, help_text="Merged into the version's; null removes an entry."
    )
    engine_env = serializers.DictField(
        child=serializers.CharField(allow_blank=True, allow_null=True, max_length=4000, trim_whitespace=False),
        required=False,
        help_text="Merged into the version's; null removes an entry.",
    )
    speculation = serializers.DictField(required=False, help_text="Replaces the version's; empty: none.")
    quantization = serializers.DictField(required=False, help_text="Replaces the version's; empty: none.")
    roles = serializers.DictField(
        child=serializers.DictField(), required=False, help_text="Replaces the version's; empty: none."
    )


class ChangeDraftSerializer(StrictSerializer):
    """Omitted fields stay unchanged."""

    engine = serializers.ChoiceField(choices=ENGINES, required=False)
    engine_build = serializers.CharField(max_length=64, required=False, allow_blank=True, help_text=BUILD_HELP)
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
        help_text="Why it has no golden prompts.",
    )
    attention_heads = serializers.IntegerField(min_value=1, max_value=COUNT_MAX, required=False, allow_null=True)
    kv_heads = serializers.IntegerField(min_value=1, max_value=COUNT_MAX, required=False, allow_null=True)
    layers = serializers.IntegerField(min_value=1, max_value=COUNT_MAX, required=False, allow_null=True)
    speculation = serializers.DictField(
        required=False,
        help_text="`method` (`ngram`, `draft_model`, `medusa`, `eagle`, `eagle3`) and its settings.",
    )
    quantization = serializers.DictField(
        required=False, help_text="Quantization of the weights, in the engine's terms."
    )
    adapters = serializers.ListField(
        child=AskedAdapterSerializer(),
        max_length=ADAPTERS_MAX,
        required=False,
        help_text="LoRA adapters: `name`, `artifact_uri`, `artifact_digest`, `rank`; each is served under its name.",
    )
    roles = serializers.DictField(
        child=serializers.DictField(),
        required=False,
        help_text="Differences of `prefill` and `decode` cells: `parallelism` (instance type -> `tp`), "
        "`engine_options`, `max_concurrency`.",
    )
    modalities = serializers.ListField(
        child=serializers.ChoiceField(choices=[(one.value, one.value) for one in Modality]),
        max_length=len(Modality),
        required=False,
        help_text="Content that it serves in addition to text: `image`, `audio`, `video`. Other content gets a 400.",
    )
    by_type = serializers.DictField(
        child=OnTypeSerializer(),
        required=False,
        help_text=(
            "Instance type of `parallelism` -> other fields that differ there: engine, artifact, options and others."
        ),
    )


class EditDraftSerializer(ChangeDraftSerializer):
    revision = serializers.IntegerField(
        min_value=1,
        max_value=COUNT_MAX,
        required=False,
        help_text="Revision that you have read; 409 if there is a newer one.",
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
        help_text="`model@version` from which omitted fields are copied.",
    )

    class Meta:
        examples = {"version": "2", "based_on": "smollm2@1", "engine_options": {"enforce_eager": False}}

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        if not attrs["based_on"] and "engine" not in attrs:
            raise serializers.ValidationError(
                {"engine": serializers.ErrorDetail("is required without based_on", "required")}
            )
        return attrs


class ReasonSerializer(StrictSerializer):
    """An irreversible change needs a reason."""

    why = serializers.CharField(max_length=200, help_text="Reason, shown in the timeline.")


class EngineAllowanceSerializer(serializers.ModelSerializer[EngineAllowance]):
    engine = serializers.ChoiceField(choices=ENGINES)
    name = serializers.CharField(help_text="`--option` or `VARIABLE`.")

    class Meta:
        model = EngineAllowance
        fields = ["id", "engine", "name", "why", "actor", "created_at"]
        examples = {"name": "--trust-remote-code"}


class AllowSerializer(StrictSerializer):
    engine = serializers.ChoiceField(choices=ENGINES)
    name = serializers.CharField(max_length=128, help_text="`trust_remote_code`, `--trust-remote-code`, `LD_PRELOAD`.")
    why = serializers.CharField(
        max_length=200, help_text="Reason: the allowance lets versions use an option outside the lists."
    )

    class Meta:
        examples = {"name": "--trust-remote-code"}


class EngineAllowanceViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[EngineAllowance]):
    """Options and variables that engines may get beyond Switchyard's lists. Each lets operators run something on nodes
    that the lists exclude."""

    queryset = EngineAllowance.objects.all()
    serializer_class = EngineAllowanceSerializer
    filterset_fields = ("engine",)
    page_order = "id"
    needs = {"create": Role.ADMIN, "destroy": Role.ADMIN}
    ordering_fields = ("id", "engine", "name", "created_at")
    aliases = ("allowances",)
    columns = "ID, ENGINE, NAME, ACTOR, WHY, AGE=created_at:age"

    @extend_schema(request=AllowSerializer, responses={200: EngineAllowanceSerializer, 202: ApprovalSerializer})
    def create(self, request: Request) -> Response:
        """Allow an engine one more option or variable. 409 if it is allowed already; 202 if it needs two-person
        approval."""
        body = body_of(request, AllowSerializer)
        row = engine_allowance_request(**body, actor=actor_of(request), now=clock.now())
        if isinstance(row, Approval):
            return waiting(row)
        return Response(EngineAllowanceSerializer(row).data)

    def destroy(self, request: Request, id: str) -> Response:
        """Withdraw an allowance. Running engines keep it. Responds with the former allowance."""
        return self.remove_object(request, engine_allowance_withdraw, "allowance_id")


ROUTES = (("engine-allowances", EngineAllowanceViewSet, "engine-allowance"),)
