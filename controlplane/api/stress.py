"""More load and lost regions over HTTP, for the present fleet or as documents would leave it. Changes nothing."""

from collections.abc import Sequence
from typing import Any

from drf_spectacular.utils import OpenApiExample, extend_schema, extend_schema_serializer
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.apply.documents import DocumentSerializer, documents_of, role_to_preview
from controlplane.api.apply.execution import Requester, documents_preview
from controlplane.api.apply.planning import Document
from controlplane.api.apply.view import DEPLOYMENT, PreviewDocumentsSerializer, or_refused
from controlplane.api.what_if import ForecastSerializer, forecast_response
from controlplane.forecast_budget import FORECASTS
from controlplane.stress import Question, WhatIf, check_regions, what_if
from controlplane.what_if import HasTime
from fleet.drafts.models import PlanDraft
from fleet.drafts.services import DOCUMENTS_MOST
from kernel import clock
from kernel.access import Role, require
from kernel.refusals import InvalidInput
from kernel.rest.serializers import StrictSerializer, actor_of, body_of
from kernel.rest.view_sets import ViewSet
from traffic.region_shares.planning.losses import HIGHEST_FACTOR

LOST: dict[str, Any] = {"documents": [DEPLOYMENT], "factor": 1.5, "lost": ["us-east-1"]}
ANSWER: dict[str, Any] = {
    "from": "2026-11-21T12:00:00Z",
    "holds_until": 1.8,
    "headline": "the fleet without us-east-1 holds until 1.8x the forecast of the next day (now 1.2x); first to "
    "break: TTFT of sim-70b in us-east-1 at 17:15 UTC",
    "deployments": [
        {
            "deployment": "sim-70b",
            "breaks": False,
            "load": 96.0,
            "at": "2026-11-21T17:15:00Z",
            "unplaced": 0.0,
            "holds_until": 1.8,
            "held_until": 1.2,
            "first_region": "us-east-1",
        }
    ],
    "unknown": ["chat"],
    "is_judged": True,
    "forecast": None,
}


@extend_schema_serializer(examples=[OpenApiExample("a lost region after a change", LOST, request_only=True)])
class WhatIfSerializer(StrictSerializer):
    """Which load, which losses, and in which fleet."""

    documents = serializers.ListField(
        child=DocumentSerializer(),
        required=False,
        max_length=DOCUMENTS_MOST,
        help_text="Documents as for apply; without any, the present fleet.",
    )
    draft = serializers.CharField(
        required=False, max_length=32, help_text="Key of a plan draft, from its link, in place of documents."
    )
    factor = serializers.FloatField(
        min_value=0, max_value=HIGHEST_FACTOR, default=1.0, help_text="Multiple of the load forecast for the next day."
    )
    lost = serializers.ListField(
        child=serializers.CharField(max_length=64), required=False, max_length=100, help_text="Names of lost regions."
    )
    simulate = serializers.CharField(
        required=False, max_length=64, help_text="Also simulate the loss of this region step by step."
    )

    def validate(self, asked: dict[str, Any]) -> dict[str, Any]:
        if "documents" in asked and "draft" in asked:
            raise serializers.ValidationError("give documents or a draft, not both", "one")
        return asked


class StressSerializer(serializers.Serializer[Any]):
    """A deployment at its worst moment of the next day. Requests without room wait: their time to first token grows."""

    deployment = serializers.CharField(source="stress.deployment")
    breaks = serializers.BooleanField(source="stress.breaks")
    load = serializers.FloatField(source="stress.load", help_text="Concurrent requests.")
    at = serializers.DateTimeField(source="stress.at")
    unplaced = serializers.FloatField(source="stress.unplaced", help_text="Concurrent requests without room.")
    holds_until = serializers.FloatField(
        source="stress.holds_until", help_text=f"Multiple of the forecast; {HIGHEST_FACTOR:.0f} means at least that."
    )
    held_until = serializers.FloatField(
        allow_null=True, help_text="The same in the present fleet; null without documents."
    )
    first_region = serializers.CharField(
        source="stress.first", help_text="The region whose requests are the first without room."
    )


@extend_schema_serializer(examples=[OpenApiExample("a lost region after a change", ANSWER, response_only=True)])
class WhatIfResponseSerializer(serializers.Serializer[Any]):
    """The first deployment to break comes first. `unknown`: deployments without a forecast of their load."""

    holds_until = serializers.FloatField(allow_null=True, help_text="Of all deployments; null without a forecast.")
    headline = serializers.CharField()
    deployments = StressSerializer(source="rows", many=True)
    unknown = serializers.ListField(child=serializers.CharField())
    is_judged = serializers.BooleanField(help_text="Whether the forecasts were compared with past errors.")
    forecast = ForecastSerializer(allow_null=True, help_text="Of `simulate`.")

    def get_fields(self) -> dict[str, Any]:
        return {"from": serializers.DateTimeField(help_text="Time of the snapshot."), **super().get_fields()}


class WhatIfViewSet(ViewSet):
    """Predictions. Nothing is changed."""

    reads = frozenset({"create"})

    @extend_schema(operation_id="what_if", request=WhatIfSerializer, responses={200: WhatIfResponseSerializer})
    def create(self, request: Request) -> Response:
        """Compute until which multiple of the forecast load each deployment holds, without the lost regions, and what
        breaks first, where and when. With documents or a draft: of the fleet after them. A draft needs the operator
        role. 503 while another forecast runs, and 429 after your forecasts of this minute are used up, both with
        `Retry-After`. 400 if it takes longer than one forecast may."""
        asked = body_of(request, WhatIfSerializer)
        documents = documents_of(_documents(request, asked))
        require(request, role_to_preview(documents))
        now = clock.now()
        requester = Requester(actor=actor_of(request), why="", now=now)
        question = Question(asked["factor"], tuple(asked.get("lost", ())), asked.get("simulate", ""))
        with FORECASTS.take(request.user.get_username()) as has_time:
            answer = _answer(question, documents, requester, has_time)
        check_regions(asked.get("lost", ()), answer.regions, "lost")
        return Response(WhatIfResponseSerializer(_fields(answer, now)).data)


def _documents(request: Request, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Raises PermissionDenied for a draft without the operator role, InvalidInput if there is no such draft."""
    if "draft" not in asked:
        return list(asked.get("documents", ()))
    require(request, Role.OPERATOR)
    row = PlanDraft.objects.filter(key=asked["draft"]).first()
    if row is None:
        raise InvalidInput(field="draft", rule="exists", message="there is no such draft")
    if not row.documents:
        return []
    valid = PreviewDocumentsSerializer(data={"documents": row.documents})
    valid.is_valid(raise_exception=True)
    return list(valid.validated_data["documents"])


def _answer(question: Question, documents: Sequence[Document], requester: Requester, has_time: HasTime) -> WhatIf:
    if not documents:
        return what_if(question, now=requester.now, has_time=has_time)
    result = or_refused(
        documents_preview,
        documents=documents,
        requester=requester,
        with_fleet=bool(question.simulate),
        with_load=True,
        has_time=has_time,
    )
    return what_if(question, now=requester.now, has_time=has_time, after=result.load, fleet_after=lambda: result.fleet)


def _fields(answer: WhatIf, now: Any) -> dict[str, Any]:
    return {
        "from": now,
        "holds_until": answer.holds_until,
        "headline": answer.headline,
        "rows": answer.rows,
        "unknown": answer.unknown,
        "is_judged": answer.is_judged,
        "forecast": forecast_response(answer.forecast, now) if answer.forecast else None,
    }
