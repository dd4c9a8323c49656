"""The request bodies of model versions. Types and ranges are checked here; what values mean is for the services.

What admins allow engines beyond the lists, over HTTP. Decides nothing; services do.
"""

from typing import Any

from django.db.models import QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from accounts.api.approvals import ApprovalSerializer, waiting
from accounts.models import Approval
from kernel import clock
from kernel.access import Role
from kernel.rest.serializers import StrictSerializer, actor_of
from kernel.rest.view_sets import GenericViewSet, ListModelMixin
from models_registry.versions.models import EngineAllowance
from models_registry.versions.planning.engine_arguments import ENGINES
from models_registry.versions.planning.lifecycle import GOLDEN_PROMPTS_MAX
from models_registry.versions.planning.spec import ADAPTERS_MAX, RANKS, READY_TIMEOUT_MAX_S
from models_registry.versions.services.drafts import engine_allowance_request, engine_allowance_withdraw

COUNT_MAX = 2**31 - 1
TOKENS_MAX = 10_000_000


class DegreeSerializer(serializers.DictField):
    """Degrees of one instance type; 65,536 ranks are more than any machine of today has."""

    child = serializers.IntegerField(min_value=1, max_value=65_536)


class AskedGoldenPromptSerializer(StrictSerializer):
    prompt = serializers.CharField(max_length=4000, trim_whitespace=False)
    expect = serializers.CharField(
        max_length=1000, trim_whitespace=False, help_text="Text that the answer must contain."
    )


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
        help_text="Differences of `prefill` and `decode` cells: `parallelism` (instance type -> `tp`), "
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
    why = serializers.CharField(max_length=200, help_text="Your reason: it lets versions run what the lists do not.")

    class Meta:
        examples = {"name": "--trust-remote-code"}


class EngineAllowanceFilter(filters.FilterSet):
    engine = filters.CharFilter()

    class Meta:
        model = EngineAllowance
        fields: list[str] = []


class EngineAllowanceViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[EngineAllowance]):
    """Options and variables that engines may be given beyond the lists that come with Switchyard. Each lets operators
    have nodes run what those lists keep out."""

    serializer_class = EngineAllowanceSerializer
    filterset_class = EngineAllowanceFilter
    lookup_field = "id"
    lookup_value_regex = r"[0-9]{1,18}"
    page_order = "id"
    needs = {"create": Role.ADMIN, "destroy": Role.ADMIN}
    ordering_fields = ("id", "engine", "name", "created_at")
    aliases = ("allowances",)
    columns = "ID, ENGINE, NAME, ACTOR, WHY, AGE=created_at:age"

    def get_queryset(self) -> QuerySet[EngineAllowance]:
        return EngineAllowance.objects.all()

    @extend_schema(
        operation_id="engine_allowances_create",
        request=AllowSerializer,
        responses={200: EngineAllowanceSerializer, 202: ApprovalSerializer},
    )
    def create(self, request: Request) -> Response:
        """Allow an engine one more option or variable. 409 if it may be given it already; 202 where that needs
        two-person approval."""
        body = AllowSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        row = engine_allowance_request(**body.validated_data, actor=actor_of(request), now=clock.now())
        if isinstance(row, Approval):
            return waiting(row)
        return Response(EngineAllowanceSerializer(row).data)

    @extend_schema(operation_id="engine_allowances_delete", responses={200: EngineAllowanceSerializer})
    def destroy(self, request: Request, id: str) -> Response:
        """Withdraw an allowance. Running engines keep it. Responds with the former allowance."""
        row = self.get_object()
        shown = EngineAllowanceSerializer(row).data
        engine_allowance_withdraw(allowance_id=row.pk, actor=actor_of(request), now=clock.now())
        return Response(shown)
