"""Loads the current state in the form of documents. Never writes."""

from collections.abc import Iterable
from typing import Any

from controlplane.api.apply.access_kinds import (
    groups_present,
    identity_provider_present,
    users_present,
    webhooks_present,
)
from controlplane.api.apply.planning import Document, Kind, Present, object_revisions
from fleet.autoscaling.planning.policy import cells_as_json
from fleet.deployments.models import Deployment
from fleet.faults.models import FaultRule
from fleet.faults.planning.views import RuleMode
from fleet.quotas.models import Quota
from fleet.reconcile.planning.states import RolloutState
from fleet.regions.models import Region
from fleet.rollouts.models import Rollout
from fleet.rollouts.selectors import ACTIVE
from models_registry.imports.models import ModelImport
from models_registry.imports.planner import ImportState
from models_registry.instance_types.models import SETTABLE
from models_registry.instance_types.selectors import instance_shapes
from models_registry.versions.models import Model, ModelVersion, Validation
from models_registry.versions.planning.lifecycle import ValidationState
from models_registry.versions.services.drafts import COLUMNS
from traffic.batch_schedules.selectors import batch_schedules_present
from traffic.batch_sinks.selectors import batch_sinks_present
from traffic.region_shares.models import TrafficRule
from traffic.region_shares.planning.policy import TrafficPolicy, traffic_policy_as_json

Key = tuple[Kind, str]
Stated = dict[str, Any]


def present_of(documents: Iterable[Document]) -> Present:
    """The current object of each document's kind and name, or None: one or two queries per kind."""
    wanted: dict[Kind, set[str]] = {}
    for document in documents:
        wanted.setdefault(document.kind, set()).add(document.name)
    present: dict[Key, Stated | None] = {}
    for kind, names in wanted.items():
        there = _LOADERS[kind](names)
        present.update({(kind, name): there.get(name) for name in names})
    return present


def revisions_of(documents: Iterable[Document]) -> dict[str, str]:
    """Title of each document -> the present revision of its object, to notice later changes."""
    return object_revisions(present_of(documents))


def _instance_types(names: set[str]) -> dict[str, Stated]:
    shapes = instance_shapes(names)
    return {name: {column: getattr(shape, column) for column in SETTABLE} for name, shape in shapes.items()}


def _regions(names: set[str]) -> dict[str, Stated]:
    return {
        row.name: {
            "provider": row.provider,
            "stack": row.cloud.stack if hasattr(row, "cloud") else "",
            "aws_region": row.cloud.aws_region if hasattr(row, "cloud") else "",
            "position": row.position,
            "ingress_url": row.ingress_url,
            "spares": row.spares,
            "plain_http": row.plain_http,
            "cheapest_first": row.cheapest_first,
            "grpc": row.grpc,
            "alarms": row.alarms,
        }
        for row in Region.objects.select_related("cloud").filter(name__in=names)
    }


def _quotas(names: set[str]) -> dict[str, Stated]:
    rows = Quota.objects.filter(name__in=names)
    return {row.name: {"machines": row.machines, "borrow_most": row.borrow_most} for row in rows}


def _models(names: set[str]) -> dict[str, Stated]:
    return {row.name: {"description": row.description} for row in Model.objects.filter(name__in=names)}


def _imports(names: set[str]) -> dict[str, Stated]:
    """The newest import of each version, unless it failed or was cancelled: those start again."""
    ended = (ImportState.FAILED.value, ImportState.CANCELLED.value)
    rows = ModelImport.objects.filter(draft__in=names).exclude(state__in=ended).order_by("pk")
    return {row.draft: {"source": row.source, "pattern": row.pattern, "engine": row.engine} for row in rows}


def _versions(names: set[str]) -> dict[str, Stated]:
    models = {name.partition("@")[0] for name in names}
    running = set(
        Validation.objects.filter(state=ValidationState.RUNNING.value, version__model_id__in=models).values_list(
            "version_id", flat=True
        )
    )
    return {
        row.reference: {
            **{column: getattr(row, column) for column in COLUMNS},
            "_state": row.state,
            "_validating": row.pk in running,
        }
        for row in ModelVersion.objects.filter(model_id__in=models)
        if row.reference in names
    }


def _deployments(names: set[str]) -> dict[str, Stated]:
    rows = Deployment.objects.filter(name__in=names).select_related("model_version").prefetch_related("regions")
    targets = _targets(names)
    return {
        row.name: {
            "model_version": row.model_version.reference,
            **{column: getattr(row, column) for column in Deployment.SETTABLE},
            "by_type": {place.region_id: place.by_type for place in row.regions.all()},
            "regions": {
                place.region_id: cells_as_json(place.stated(plans_roles=row.plans_roles)) for place in row.regions.all()
            },
            "_target": targets.get(row.name, row.model_version.reference),
        }
        for row in rows
    }


def _targets(names: set[str]) -> dict[str, str]:
    """Deployment -> target version of its active rollout."""
    active = Rollout.objects.filter(deployment_id__in=names, state__in=ACTIVE)
    return {
        rollout.deployment_id: (
            rollout.from_version if rollout.state == RolloutState.ROLLING_BACK else rollout.to_version
        ).reference
        for rollout in active.select_related("from_version", "to_version")
    }


def _traffic_policies(names: set[str]) -> dict[str, Stated]:
    """Every deployment has one; new ones have the defaults."""
    rules = {rule.deployment_id: rule.policy() for rule in TrafficRule.objects.filter(deployment_id__in=names)}
    return {name: traffic_policy_as_json(rules.get(name, TrafficPolicy())) for name in names}


def _fault_rules(names: set[str]) -> dict[str, Stated]:
    modes = dict(FaultRule.objects.filter(rule__in=names).values_list("rule", "mode"))
    return {name: {"mode": modes.get(name, RuleMode.ON.value)} for name in names}


_LOADERS = {
    Kind.INSTANCE_TYPE: _instance_types,
    Kind.REGION: _regions,
    Kind.QUOTA: _quotas,
    Kind.MODEL: _models,
    Kind.MODEL_IMPORT: _imports,
    Kind.MODEL_VERSION: _versions,
    Kind.DEPLOYMENT: _deployments,
    Kind.TRAFFIC_POLICY: _traffic_policies,
    Kind.BATCH_SINK: batch_sinks_present,
    Kind.BATCH_SCHEDULE: batch_schedules_present,
    Kind.FAULT_RULE: _fault_rules,
    Kind.GROUP: groups_present,
    Kind.USER: users_present,
    Kind.IDENTITY_PROVIDER: identity_provider_present,
    Kind.WEBHOOK: webhooks_present,
}
