"""Reads declarative documents: the fields of each kind and their types. An unknown field is an error with its path and
the allowed names. It never checks whether values make sense together; the plan and the services do."""

from collections.abc import Iterable, Mapping
from typing import Any

from rest_framework import serializers

from controlplane.api.apply.access_kinds import (
    ACCESS_NAME_MAX,
    ACCESS_NAME_RULES,
    ACCESS_NAMES,
    ACCESS_SPECS,
    PRIVATE,
    SECRET_FIELDS,
    check_access_name,
)
from controlplane.api.apply.planning import Document, Kind
from fleet.deployments.api import ChangeDeploymentSerializer
from fleet.deployments.models import Deployment
from fleet.faults.planning.views import SETTABLE_RULES, RuleMode
from fleet.quotas.models import Quota
from fleet.reconcile.planning.states import choices
from fleet.regions.api import DescribedRegionSerializer
from fleet.regions.models import Region
from kernel.access import Role
from kernel.rest.serializers import ColumnsSerializer, StrictSerializer
from models_registry.imports.api import ImportSourceSerializer
from models_registry.instance_types.api import InstanceTypeColumnsSerializer
from models_registry.instance_types.planner import NAME as TYPE_NAME
from models_registry.versions.api.version_requests import ChangeDraftSerializer
from traffic.batch_schedules.api import ChangeBatchScheduleSerializer
from traffic.region_shares.api.shares import TrafficPolicyChangeSerializer

API_VERSION = "switchyard/v1"
DOCUMENTS_MOST = 500
NAME = r"^[-a-zA-Z0-9_]+\Z"
QUOTA_NAME = r"^[A-Za-z0-9][-A-Za-z0-9_]{0,63}:[A-Za-z0-9][A-Za-z0-9._-]*(:[-a-zA-Z0-9_]+)?\Z"
VERSION_NAME = r"^[-a-zA-Z0-9_]+@[A-Za-z0-9][A-Za-z0-9._-]*\Z"


NAMES: Mapping[Kind, str] = {
    Kind.MODEL_VERSION: VERSION_NAME,
    Kind.MODEL_IMPORT: VERSION_NAME,
    Kind.INSTANCE_TYPE: TYPE_NAME,
    Kind.QUOTA: QUOTA_NAME,
    **ACCESS_NAMES,
}


class ModelSpec(StrictSerializer):
    description = serializers.CharField(max_length=2000, required=False, allow_blank=True)


class ModelVersionSpec(ChangeDraftSerializer):
    based_on = serializers.CharField(
        max_length=170, required=False, allow_blank=True, help_text="`model@version` from which a new draft is copied."
    )
    validate = serializers.BooleanField(  # type: ignore[assignment]
        required=False, help_text="Validate the draft after its change: read its artifacts and check their digests."
    )


class DeploymentSpec(ChangeDeploymentSerializer):
    """Version, instance types, number of cells and policies."""

    model_version = serializers.RegexField(VERSION_NAME, max_length=170, required=False)
    allow_unreleased = serializers.BooleanField(required=False)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        return attrs  # an empty spec changes nothing


class QuotaSpec(ColumnsSerializer):
    """Team, type and region are in the name."""

    class Meta:
        model = Quota
        columns = ("machines", "borrow_most")

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        fields = super().get_fields()
        fields["machines"].required = False
        return fields


class BatchScheduleSpec(ChangeBatchScheduleSerializer):
    """Times or a prefix, and the batches that they create. A key is its prefix."""

    def validate_key(self, key: str) -> str:
        return key.removeprefix("sw_")


class FaultRuleSpec(StrictSerializer):
    mode = serializers.ChoiceField(choices=choices(RuleMode))


SPECS: Mapping[Kind, type[StrictSerializer]] = {
    Kind.INSTANCE_TYPE: InstanceTypeColumnsSerializer,
    Kind.REGION: DescribedRegionSerializer,
    Kind.QUOTA: QuotaSpec,
    Kind.MODEL: ModelSpec,
    Kind.MODEL_IMPORT: ImportSourceSerializer,
    Kind.MODEL_VERSION: ModelVersionSpec,
    Kind.DEPLOYMENT: DeploymentSpec,
    Kind.TRAFFIC_POLICY: TrafficPolicyChangeSerializer,
    Kind.BATCH_SCHEDULE: BatchScheduleSpec,
    Kind.FAULT_RULE: FaultRuleSpec,
    **ACCESS_SPECS,
}
NEEDS: Mapping[Kind, Role] = {Kind.FAULT_RULE: Role.ADMIN, **dict.fromkeys(PRIVATE, Role.ADMIN)}
"""The role that changes an object of a kind, as at its own path of the API; other kinds need an operator."""
NAME_MAX: Mapping[Kind, int] = {
    Kind.INSTANCE_TYPE: 64,
    Kind.REGION: Region._meta.pk.max_length or 64,
    Kind.MODEL_VERSION: 161,
    Kind.MODEL_IMPORT: 161,
    Kind.QUOTA: 170,
    Kind.BATCH_SCHEDULE: 64,
    **ACCESS_NAME_MAX,
}


class MetadataSerializer(StrictSerializer):
    name = serializers.CharField(
        max_length=170,
        help_text="The name of a ModelVersion or ModelImport is `model@version`, of a Quota `team:type:region`, of the "
        "IdentityProvider `oidc`.",
    )


class DocumentSerializer(StrictSerializer):
    """The desired state of one object. Fields that `spec` omits keep their values."""

    kind = serializers.ChoiceField(choices=choices(Kind))
    metadata = MetadataSerializer()
    spec = serializers.DictField(required=False, default=dict, help_text="Its fields depend on the kind.")

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        return {"apiVersion": serializers.ChoiceField(choices=[(API_VERSION, API_VERSION)]), **super().get_fields()}

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        kind, name = Kind(attrs["kind"]), attrs["metadata"]["name"]
        _check_name(kind, name)
        spec = SPECS[kind](data=attrs["spec"])
        if not spec.is_valid():
            raise serializers.ValidationError({"spec": spec.errors})
        return {"kind": kind, "name": name, "spec": plain(spec.validated_data)}


def role_needed(documents: Iterable[Document]) -> Role:
    """The role that may apply all of these documents."""
    needed = {Role.OPERATOR, *(NEEDS.get(one.kind, Role.OPERATOR) for one in documents)}
    return max(needed, key=lambda role: role.rank)


def role_to_preview(documents: Iterable[Document]) -> Role:
    """The role that may see a plan of all these documents, which shows the present state of their objects."""
    return Role.ADMIN if any(one.kind in PRIVATE for one in documents) else Role.VIEWER


def takes_fresh_factor(documents: Iterable[Document]) -> bool:
    """Whether applying them requires a fresh second factor of users who have one: who sets the identity provider
    decides who logs in."""
    return any(one.kind is Kind.IDENTITY_PROVIDER for one in documents)


def _check_name(kind: Kind, name: str) -> None:
    rule = serializers.RegexField(
        NAMES.get(kind, NAME),
        max_length=NAME_MAX.get(kind, Deployment._meta.pk.max_length or 96),
    )
    wanted = {
        Kind.MODEL_VERSION: "has the form model@version",
        Kind.MODEL_IMPORT: "is that of the version to draft, model@version",
        Kind.QUOTA: "is TEAM:TYPE or TEAM:TYPE:REGION",
        Kind.INSTANCE_TYPE: "may have only letters, digits, ., - and _, and begins with a letter or digit",
        **ACCESS_NAME_RULES,
    }.get(kind, "may have only letters, digits, - and _")
    try:
        rule.run_validation(name)
    except serializers.ValidationError:
        refusal = serializers.ErrorDetail(f"{name[:60]!r}: the name of a {kind} {wanted}", "name")
        raise serializers.ValidationError({"metadata": {"name": [refusal]}}) from None
    if wrong := check_access_name(kind, name):
        raise serializers.ValidationError({"metadata": {"name": [serializers.ErrorDetail(wrong, "name")]}})
    if kind is Kind.FAULT_RULE and name not in SETTABLE_RULES:
        there = ", ".join(rule.value for rule in SETTABLE_RULES)
        refusal = serializers.ErrorDetail(f"unknown fault rule {name!r}; the rules are: {there}", "exists")
        raise serializers.ValidationError({"metadata": {"name": [refusal]}})


def plain(value: Any) -> Any:
    """The same in plain dictionaries and lists, as JSON columns return them."""
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value


def documents_of(valid: list[dict[str, Any]]) -> tuple[Document, ...]:
    """The validated documents as planner input, with their secrets apart."""
    return tuple(_document(index, **one) for index, one in enumerate(valid))


def _document(index: int, kind: Kind, name: str, spec: Mapping[str, Any]) -> Document:
    secret = SECRET_FIELDS.get(kind, "")
    plain_spec = {field: value for field, value in spec.items() if field != secret}
    return Document(index, kind, name, plain_spec, {secret: spec[secret]} if secret in spec else {})
