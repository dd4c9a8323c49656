"""Declarative documents over HTTP: preview and apply. Decides nothing: plan and services do."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from drf_spectacular.utils import OpenApiExample, extend_schema, extend_schema_serializer
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from accounts.permissions import require_fresh_factor
from controlplane.api.apply.documents import (
    DOCUMENTS_MOST,
    DocumentSerializer,
    documents_of,
    role_needed,
    role_to_preview,
    takes_fresh_factor,
)
from controlplane.api.apply.execution import ApplyResult, NotPossible, Requester, documents_apply, documents_preview
from controlplane.api.apply.planning import Action, Change, Document, Kind, Objection, Step
from controlplane.api.what_if import FORECAST, ForecastSerializer, forecast_response
from controlplane.forecast_budget import FORECASTS
from controlplane.what_if import HasTime, plan_onwards
from fleet.reconcile.planning.states import choices
from kernel import clock
from kernel.access import access_of, require
from kernel.refusals import Conflict
from kernel.rest.serializers import StrictSerializer, actor_of, body_of
from kernel.rest.view_sets import ViewSet
from models_registry.versions.planning.diff import without_values
from simulator.prediction import Forecast

DEPLOYMENT: dict[str, Any] = {
    "apiVersion": "switchyard/v1",
    "kind": "Deployment",
    "metadata": {"name": "sim-70b"},
    "spec": {"regions": [{"region": "us-west-2", "cells": 3}]},
}
PREVIEW: dict[str, Any] = {"documents": [DEPLOYMENT]}
APPLY: dict[str, Any] = {"documents": [DEPLOYMENT], "revision": "5d41402abc4b2a76", "why": "a campaign in the west"}
STEP: dict[str, Any] = {
    "document": 0,
    "kind": "Deployment",
    "name": "sim-70b",
    "action": "scale",
    "reason": "sim-70b should have 3 cells in us-west-2, not 2",
    "changes": [{"field": "regions.us-west-2.cells", "before": 2, "after": 3}],
}
PLAN: dict[str, Any] = {
    "applied": False,
    "revision": "5d41402abc4b2a76",
    "steps": [STEP],
    "unchanged": [],
    "effects": [{"deployment": "sim-70b", "forecast": FORECAST}],
    "not_predicted": [],
    "waiting": [],
}
APPLIED: dict[str, Any] = {**PLAN, "applied": True, "effects": []}


PREDICTED_MOST = 4
"""Predicted deployments per response: each simulation takes a second or two."""


@extend_schema_serializer(examples=[OpenApiExample("one more cell", PREVIEW, request_only=True)])
class PreviewDocumentsSerializer(StrictSerializer):
    """Documents to preview."""

    documents = serializers.ListField(child=DocumentSerializer(), min_length=1, max_length=DOCUMENTS_MOST)


@extend_schema_serializer(examples=[OpenApiExample("one more cell", APPLY, request_only=True)])
class ApplyDocumentsSerializer(PreviewDocumentsSerializer):
    """Documents, and the revision of the reviewed plan."""

    dry_run = serializers.BooleanField(required=False, default=False, help_text="Only return the plan.")
    revision = serializers.CharField(
        max_length=64,
        required=False,
        allow_blank=True,
        default="",
        help_text="Revision of the plan: 409 if anything has changed since.",
    )
    why = serializers.CharField(
        required=False, allow_blank=True, max_length=200, default="", help_text="Reason, shown in the timeline."
    )


class DocumentChangeSerializer(serializers.Serializer[Any]):
    field = serializers.CharField(help_text="Dotted path below `spec`.")
    before = serializers.JSONField(help_text="Null if it does not exist yet.")
    after = serializers.JSONField()


class ApplyStepSerializer(serializers.Serializer[Step]):
    document = serializers.IntegerField(source="document.index", help_text="Position of its document in the request.")
    kind = serializers.ChoiceField(source="document.kind", choices=choices(Kind))
    name = serializers.CharField(source="document.name")
    action = serializers.ChoiceField(choices=choices(Action))
    reason = serializers.CharField()
    changes = DocumentChangeSerializer(many=True)


class DeploymentForecastSerializer(serializers.Serializer[Any]):
    deployment = serializers.CharField()
    forecast = ForecastSerializer()


class WaitingSerializer(serializers.Serializer[Any]):
    approval = serializers.IntegerField(allow_null=True, help_text="ID of the requested approval; null in a plan.")
    summary = serializers.CharField()


@extend_schema_serializer(
    examples=[
        OpenApiExample("plan", PLAN, response_only=True),
        OpenApiExample("applied", APPLIED, response_only=True),
    ]
)
class AppliedSerializer(serializers.Serializer[Any]):
    """The steps in order. `effects` of a plan: predictions for each deployment that it changes."""

    applied = serializers.BooleanField(help_text="Whether the steps were carried out.")
    revision = serializers.CharField(help_text="Revision of these documents' objects before the steps.")
    steps = ApplyStepSerializer(many=True)
    unchanged = serializers.ListField(child=serializers.CharField(), help_text="`Kind name` of unchanged objects.")
    effects = DeploymentForecastSerializer(many=True)
    waiting = WaitingSerializer(many=True, help_text="Rollouts that wait for a second admin's approval.")
    not_predicted = serializers.ListField(
        child=serializers.CharField(), help_text="Deployments beyond the limit of predictions."
    )


class ApplyViewSet(ViewSet):
    """Applies documents that describe the fleet. Omitted fields and objects stay unchanged."""

    reads = frozenset({"preview"})

    def requested_deployment(self, request: Request) -> str:
        """The only deployment of all documents, for users with a grant for that deployment."""
        return deployment_described(request.data)

    @extend_schema(operation_id="apply", request=ApplyDocumentsSerializer, responses={200: AppliedSerializer})
    def create(self, request: Request) -> Response:
        """Apply documents: all missing changes or none, in order of dependency. With `revision`, 409 if the documents'
        objects have changed since that plan was made. With `dry_run`, a preview."""
        payload = body_of(request, ApplyDocumentsSerializer)
        documents, requester = documents_of(payload["documents"]), _sender(request, payload["why"])
        if payload["dry_run"]:
            return _preview(request, documents, requester)
        require(request, role_needed(documents), deployment_described(request.data))
        if takes_fresh_factor(documents):
            require_fresh_factor(request, requester.now)
        result = or_refused(documents_apply, documents=documents, requester=requester, revision=payload["revision"])
        return Response(AppliedSerializer(_result_fields(result, applied=True)).data)

    @extend_schema(request=PreviewDocumentsSerializer, responses={200: AppliedSerializer})
    @action(detail=False, methods=["post"])
    def preview(self, request: Request) -> Response:
        """Predict the changes that applying these documents would make, and simulate the deployments that it would
        change. Changes nothing, and rejects what applying would reject. 503 while another forecast runs, and 429 after
        your forecasts of this minute are used up, both with `Retry-After`. 400 if the documents take longer than one
        forecast may. Viewers see no values of engines' variables."""
        payload = body_of(request, PreviewDocumentsSerializer)
        return _preview(request, documents_of(payload["documents"]), _sender(request, ""))


def deployment_described(body: Any) -> str:
    """The name of the deployment that all documents of a request belong to; "" if there is none."""
    documents = body.get("documents") if isinstance(body, dict) else None
    named: set[str] = set()
    for document in documents if isinstance(documents, list) else ():
        metadata = document.get("metadata") if isinstance(document, dict) else None
        name = metadata.get("name") if isinstance(metadata, dict) else None
        own = isinstance(name, str) and document.get("kind") in (Kind.DEPLOYMENT, Kind.TRAFFIC_POLICY)
        named.add(str(name) if own else "")
    return named.pop() if len(named) == 1 else ""


def _sender(request: Request, why: str) -> Requester:
    return Requester(actor=actor_of(request), why=why, now=clock.now())


def or_refused(service: Any, **arguments: Any) -> ApplyResult:
    """The service's result; rule violations become API errors. Raises Conflict if the only errors are conflicts with
    the current state. Raises ValidationError for every broken rule, by path."""
    try:
        outcome: ApplyResult = service(**arguments)
    except NotPossible as refused:
        if all(objection.rule == "conflict" for objection in refused.objections):
            conflicts = (f"{objection.document.title}: {objection.message}" for objection in refused.objections)
            raise Conflict("; ".join(conflicts)) from None
        raise serializers.ValidationError(_by_path(refused.objections)) from None
    return outcome


def _by_path(objections: Sequence[Objection]) -> dict[str, list[str]]:
    errors: dict[str, list[str]] = {}
    for objection in objections:
        path = f"documents.{objection.document.index}.{objection.field}".rstrip(".")
        errors.setdefault(path, []).append(serializers.ErrorDetail(objection.message, objection.rule))
    return errors


def _preview(request: Request, documents: Sequence[Document], requester: Requester) -> Response:
    """A plan with predictions for the changed deployments, within the time limit. Plans about access are for admins."""
    require(request, role_to_preview(documents))
    with FORECASTS.take(request.user.get_username()) as has_time:
        result = or_refused(documents_preview, documents=documents, requester=requester, has_time=has_time)
        shown = result if access_of(request).operate else _without_values(result)
        return _preview_response(shown, requester.now, has_time)


def _without_values(result: ApplyResult) -> ApplyResult:
    def shown(change: Change) -> Change:
        before, after = (without_values(change.field, value) for value in (change.before, change.after))
        return replace(change, before=before, after=after)

    steps = tuple(replace(step, changes=tuple(map(shown, step.changes))) for step in result.plan.steps)
    return replace(result, plan=replace(result.plan, steps=steps))


def _preview_response(result: ApplyResult, now: datetime, has_time: HasTime) -> Response:
    forecasts, beyond = predicted_effects(result, now, has_time)
    effects = [
        {"deployment": name, "forecast": forecast_response(forecast, now)} for name, forecast in forecasts.items()
    ]
    fields = {**_result_fields(result, applied=False), "effects": effects, "not_predicted": beyond}
    return Response(AppliedSerializer(fields).data)


def predicted_effects(result: ApplyResult, now: datetime, has_time: HasTime) -> tuple[dict[str, Forecast], list[str]]:
    """Forecasts of the deployments that a preview with its fleet changes, by name, and the names beyond the limit."""
    if result.fleet is None:
        return {}, []
    touched = list(result.plan.deployments)
    forecasts = {
        name: plan_onwards(view=result.fleet, deployment=name, now=now, has_time=has_time)
        for name in touched[:PREDICTED_MOST]
    }
    return forecasts, touched[PREDICTED_MOST:]


def _result_fields(outcome: ApplyResult, *, applied: bool) -> dict[str, Any]:
    return {
        "applied": applied,
        "revision": outcome.revision,
        "steps": outcome.plan.steps,
        "unchanged": [document.title for document in outcome.plan.unchanged],
        "effects": [],
        "not_predicted": [],
        "waiting": [
            {"approval": approval.pk if applied else None, "summary": approval.summary} for approval in outcome.waiting
        ],
    }
