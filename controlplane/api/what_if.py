"""What-if over HTTP: predicts a rollout, a scaling, another load or the loss of a region. Changes nothing."""

from datetime import datetime, timedelta
from typing import Any

from drf_spectacular.utils import OpenApiExample, extend_schema, extend_schema_serializer
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.forecast_budget import FORECASTS
from controlplane.what_if import HasTime, plan_load, plan_lost_region, plan_rollout, plan_scale
from fleet.deployments.api import ScaleSerializer
from fleet.deployments.services.deployments import cells_stated
from kernel import clock
from kernel.rest.serializers import StrictSerializer, body_of
from kernel.rest.view_sets import ViewSet
from simulator.prediction import Forecast

ROLLOUT: dict[str, Any] = {"rollout": {"deployment": "sim-70b", "version": "sim-70b@2", "policy": {"bake_s": 120}}}
SCALE: dict[str, Any] = {"scale": {"deployment": "sim-70b", "regions": [{"region": "us-west-2", "cells": 3}]}}
MORE_LOAD: dict[str, Any] = {"load": {"deployment": "sim-70b", "factor": 1.5}}
LOSE_REGION: dict[str, Any] = {"lose_region": "us-east-1"}
FORECAST: dict[str, Any] = {
    "from": "2026-11-21T12:00:00Z",
    "took_s": 41.6,
    "looked_s": 105.0,
    "steps": [
        {
            "at_s": 0.5,
            "at": "2026-11-21T12:00:00.500000Z",
            "kind": "cell.pending",
            "subject": "sim-70b-us-west-2-5",
            "text": "3 cells wanted, 2 exist",
        },
        {
            "at_s": 41.6,
            "at": "2026-11-21T12:00:41.600000Z",
            "kind": "cell.ready",
            "subject": "sim-70b-us-west-2-5",
            "text": "all 2 ranks are ready",
        },
    ],
    "places": [
        {
            "deployment": "sim-70b",
            "region": "us-west-2",
            "wanted": 3,
            "ready_now": 2,
            "ready_least": 2,
            "least_at_s": 0.0,
            "ready_then": 3,
        }
    ],
    "machines_launched": 1,
    "refusals": [],
    "warnings": ["1 machines would be launched"],
}


CHANGES = ("rollout", "scale", "load", "lose_region")


class PlannedRolloutSerializer(StrictSerializer):
    """The rollout, as in a request to start it."""

    deployment = serializers.CharField(max_length=96)
    version = serializers.CharField(max_length=160, help_text="`model@version`")
    policy = serializers.DictField(required=False, default=dict, help_text="Differences from the deployment's policy.")
    allow_unreleased = serializers.BooleanField(required=False, default=False)


class PlannedScaleSerializer(ScaleSerializer):
    """The scaling, as in a request for it."""

    deployment = serializers.CharField(max_length=96)


class PlannedLoadSerializer(StrictSerializer):
    """Another load of a deployment with a range of cells: predicts the autoscaler's decision in mode act."""

    deployment = serializers.CharField(max_length=96)
    factor = serializers.FloatField(min_value=0, max_value=1000, help_text="Multiple of the current load.")


@extend_schema_serializer(
    examples=[
        OpenApiExample("a rollout", ROLLOUT, request_only=True),
        OpenApiExample("one more cell", SCALE, request_only=True),
        OpenApiExample("half as much again", MORE_LOAD, request_only=True),
        OpenApiExample("a region is lost", LOSE_REGION, request_only=True),
    ]
)
class QuestionSerializer(StrictSerializer):
    """Exactly one of the four."""

    rollout = PlannedRolloutSerializer(required=False)
    scale = PlannedScaleSerializer(required=False)
    load = PlannedLoadSerializer(required=False)
    lose_region = serializers.CharField(required=False, max_length=64, help_text="Name of the region.")

    def validate(self, change: dict[str, Any]) -> dict[str, Any]:
        if len(change) != 1:
            raise serializers.ValidationError(f"give one of {', '.join(CHANGES)}; got {len(change)}", "one")
        return change


class StepSerializer(serializers.Serializer[Any]):
    """A predicted change; the kind is that of the event it would write."""

    at_s = serializers.FloatField(help_text="Seconds from now.")
    at = serializers.DateTimeField()
    kind = serializers.CharField()
    subject = serializers.CharField()
    text = serializers.CharField()


class PlaceForecastSerializer(serializers.Serializer[Any]):
    """Cells in service now, at minimum, and at the end."""

    deployment = serializers.CharField()
    region = serializers.CharField()
    wanted = serializers.IntegerField()
    ready_now = serializers.IntegerField()
    ready_least = serializers.IntegerField()
    least_at_s = serializers.FloatField(
        help_text="Seconds from now until the minimum is first reached; 0 if no cell stops serving."
    )
    ready_then = serializers.IntegerField()


@extend_schema_serializer(examples=[OpenApiExample("one more cell", FORECAST, response_only=True)])
class ForecastSerializer(serializers.Serializer[Any]):
    """Typical durations, without faults. `took_s` null: not finished within the simulated `looked_s`."""

    took_s = serializers.FloatField(allow_null=True)
    looked_s = serializers.FloatField()
    steps = StepSerializer(many=True)
    places = PlaceForecastSerializer(many=True)
    machines_launched = serializers.IntegerField()
    refusals = serializers.ListField(
        child=serializers.CharField(), help_text="Refused actions, and what they wait for."
    )
    warnings = serializers.ListField(child=serializers.CharField())

    def get_fields(self) -> dict[str, Any]:
        return {"from": serializers.DateTimeField(help_text="Time of the snapshot."), **super().get_fields()}


class PlanViewSet(ViewSet):
    """Predictions. Nothing is changed."""

    reads = frozenset({"create"})

    @extend_schema(operation_id="plan", request=QuestionSerializer, responses={200: ForecastSerializer})
    def create(self, request: Request) -> Response:
        """Simulate a change from the current state of the fleet, with the live planners and typical durations, and list
        its effects. 503 while another forecast runs, and 429 after your forecasts of this minute are used up, both with
        `Retry-After`."""
        question = body_of(request, QuestionSerializer)
        now = clock.now()
        with FORECASTS.take(request.user.get_username()) as has_time:
            forecast = _predict(question, now, has_time)
        return Response(ForecastSerializer(forecast_response(forecast, now)).data)


def _predict(change: dict[str, Any], now: datetime, has_time: HasTime) -> Forecast:
    if "rollout" in change:
        return plan_rollout(**change["rollout"], now=now, has_time=has_time)
    if "scale" in change:
        cells = cells_stated(change["scale"]["regions"])
        name, by_type = change["scale"]["deployment"], change["scale"].get("by_type", {})
        return plan_scale(deployment=name, cells=cells, by_type=by_type, now=now, has_time=has_time)
    if "load" in change:
        return plan_load(**change["load"], now=now, has_time=has_time)
    return plan_lost_region(region=change["lose_region"], now=now, has_time=has_time)


def forecast_response(forecast: Forecast, now: datetime) -> dict[str, Any]:
    """A forecast for `ForecastSerializer`; `now` is the time of its snapshot."""
    return {
        "from": now,
        "took_s": forecast.took_s,
        "looked_s": forecast.looked_s,
        "steps": [
            {
                "at_s": round(step.at_s, 3),
                "at": now + timedelta(seconds=step.at_s),
                "kind": step.kind,
                "subject": step.subject,
                "text": step.text,
            }
            for step in forecast.steps
        ],
        "places": forecast.places,
        "machines_launched": forecast.machines_launched,
        "refusals": forecast.refusals,
        "warnings": forecast.warnings,
    }
