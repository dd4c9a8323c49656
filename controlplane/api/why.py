"""Why something is as it is, and replays of recorded rounds, over HTTP. Changes nothing."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from enum import StrEnum
from typing import Any

from django.http import Http404
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.explained import EXPLAINED, LOOPS, explained
from controlplane.forecast_budget import FORECASTS
from controlplane.what_if import HasTime
from fleet.faults.models import Incident
from fleet.recorder.models import RecordedRound
from fleet.recorder.planning.encoding import CannotDecode
from fleet.recorder.planning.loops import InvalidSetting, RecordedLoop
from fleet.recorder.planning.reasons import Subject
from fleet.recorder.planning.replay import ReplayedRound, changes_by_loop, replay
from fleet.recorder.selectors import (
    StoredReason,
    alternatives_of,
    reasons_about,
    round_by_id,
    rounds_decoded,
    rounds_of_incident,
    subjects_of,
)
from kernel import clock
from kernel.refusals import Conflict, InvalidInput
from kernel.rest.view_sets import ViewSet

DECISIONS, DECISIONS_MOST = 10, 100
ROUNDS, ROUNDS_MOST = 30, 200
NOT_RECORDED = (
    "Passes that decided nothing are not recorded, so another setting may also have decided something in them."
)
EACH_ON_ITS_OWN = (
    "Each round is decided on its recorded inputs; effects of other decisions on later rounds are not shown."
)


class AlternativeSerializer(serializers.Serializer[Any]):
    name = serializers.CharField()
    why_not = serializers.CharField()


class ReasonSerializer(serializers.Serializer[Any]):
    """A decision: the rule that it follows, the inputs that mattered, and the limits that they were compared with."""

    round = serializers.IntegerField(help_text="Its recorded round, for `/replay/rounds/{id}`.")
    at = serializers.DateTimeField()
    decision = serializers.CharField()
    planner = serializers.CharField()
    rule = serializers.CharField()
    reason = serializers.CharField()
    subjects = serializers.ListField(child=serializers.CharField(), help_text="Its subjects, as `cell:NAME`.")
    inputs = serializers.DictField()
    limits = serializers.DictField()
    alternatives = AlternativeSerializer(many=True, allow_null=True, help_text="Only with `alternatives=true`.")


class WhySerializer(serializers.Serializer[Any]):
    """`now`: why it is as it is, from the current state of the fleet. `decisions`: the newest about it."""

    kind = serializers.CharField()
    name = serializers.CharField()
    now = serializers.ListField(child=serializers.CharField())
    decisions = ReasonSerializer(many=True)
    notes = serializers.ListField(child=serializers.CharField(), help_text="What is missing here, and why.")


def flag(name: str, text: str) -> OpenApiParameter:
    return OpenApiParameter(name, bool, description=text)


class WhyViewSet(ViewSet):
    """Why an object is as it is."""

    kind = ""
    lookup_value_regex = r"[^/\x00]{1,200}"

    @extend_schema(
        responses=WhySerializer,
        parameters=[
            OpenApiParameter("limit", int, description=f"Decisions, at most {DECISIONS_MOST}; default {DECISIONS}."),
            flag("current", "`false` leaves out `now`, which loads the whole fleet."),
            flag("alternatives", "The other choices of the newest decision that had some, from its recorded round."),
        ],
    )
    def retrieve(self, request: Request, id: str) -> Response:
        """Explain an object: the newest decisions about it, and what it waits for. 503 while another forecast
        runs, and 429 after your forecasts of this minute are used up, both with `Retry-After`."""
        limit = _limit(request, DECISIONS, DECISIONS_MOST)
        notes: list[str] = []
        subject = Subject(self.kind)
        decisions = reasons_about(subject.named(id), limit, LOOPS)
        if _is_set(request, "alternatives"):
            decisions = _with_alternatives(decisions, notes)
        sentences: list[str] = []
        if not _is_set(request, "current", "false"):
            with FORECASTS.take(request.user.get_username()):
                sentences = explained(subject, id, clock.now())
        if not decisions and not sentences:
            raise Http404
        found = {"now": sentences, "decisions": decisions}
        return Response(WhySerializer({"kind": self.kind, "name": id, "notes": notes, **found}).data)


def _is_set(request: Request, name: str, value: str = "true") -> bool:
    stated = request.query_params.get(name, "")
    if stated not in {"", "true", "false"}:
        raise InvalidInput(field=name, rule="boolean", message=f"use true or false, not {stated[:20]!r}")
    return stated == value


def _limit(request: Request, default: int, most: int) -> int:
    stated = request.query_params.get("limit", str(default))
    if not (stated.isascii() and stated.isdigit() and len(stated) < 6 and 1 <= int(stated) <= most):
        raise InvalidInput(field="limit", rule="range", message=f"use 1 to {most}, not {stated[:20]!r}")
    return int(stated)


def _with_alternatives(decisions: list[StoredReason], notes: list[str]) -> list[StoredReason]:
    """Of the newest decision that had some, because each means reading its recording."""
    for number, one in enumerate(decisions):
        if one.has_choices:
            try:
                decisions[number] = replace(one, alternatives=alternatives_of(one, LOOPS))
            except CannotDecode as wrong:
                notes.append(f"Alternatives are unknown: {wrong}.")
            return decisions
    return decisions


# --- replay ----------------------------------------------------------------------------------------------------------


class Outcome(StrEnum):
    """Of one decision in a replay: made then and now, only then, or only now."""

    SAME = "same"
    GONE = "gone"
    NEW = "new"


class ReplayedDecisionSerializer(serializers.Serializer[Any]):
    outcome = serializers.ChoiceField(
        choices=[one.value for one in Outcome], help_text="`gone`: only recorded; `new`: only in the replay."
    )
    applied = serializers.BooleanField(help_text="Whether the recorded one was applied; stale ones are dropped.")
    decision = serializers.CharField()
    planner = serializers.CharField()
    rule = serializers.CharField()
    reason = serializers.CharField()
    subjects = serializers.ListField(child=serializers.CharField())
    inputs = serializers.DictField()
    limits = serializers.DictField()


class ReplayedRoundSerializer(serializers.Serializer[Any]):
    id = serializers.IntegerField()
    loop = serializers.CharField(help_text="The control loop: " + ", ".join(LOOPS) + ".")
    at = serializers.DateTimeField()
    release = serializers.CharField()
    same = serializers.BooleanField(help_text="All decisions of the round are the same, also those not shown.")
    decisions = ReplayedDecisionSerializer(many=True)


class ReplaySerializer(serializers.Serializer[Any]):
    settings = serializers.DictField(child=serializers.CharField(), help_text="Changed settings.")
    rounds = ReplayedRoundSerializer(many=True)
    same = serializers.BooleanField(help_text="All rounds decided the same.")
    notes = serializers.ListField(child=serializers.CharField())


SET = OpenApiParameter(
    "set",
    str,
    many=True,
    description="Another setting, such as `lost_after_s=60` or `faults.close_after_s=10`; of the autoscaler, the"
    " autopilot and the publication of tables with their name, such as `autoscaler.target_utilisation=0.5` or"
    " `autopilot.step=0.2`. May be repeated.",
)


class ReplayRoundViewSet(ViewSet):
    """Recorded rounds, decided again."""

    lookup_value_regex = "[0-9]{1,18}"

    @extend_schema(responses=ReplaySerializer, parameters=[SET])
    def retrieve(self, request: Request, id: str) -> Response:
        """Decide a recorded round again, with its settings or with others. 409 if its inputs were deleted or belong to
        another release."""
        row = round_by_id(int(id))
        if row is None:
            raise Http404
        return _replayed(request, [row], [])


class ReplayIncidentViewSet(ViewSet):
    """Recorded rounds around an incident, decided again."""

    lookup_value_regex = "[0-9]{1,18}"

    @extend_schema(
        responses=ReplaySerializer,
        parameters=[
            SET,
            OpenApiParameter("limit", int, description=f"Rounds, at most {ROUNDS_MOST}; default {ROUNDS}."),
        ],
    )
    def retrieve(self, request: Request, id: str) -> Response:
        """Decide the recorded rounds about an incident again, with their settings or with others. 409 if their inputs
        were deleted or belong to another release."""
        incident = Incident.objects.filter(pk=int(id)).first()
        if incident is None:
            raise Http404
        rows = rounds_of_incident(incident, _limit(request, ROUNDS, ROUNDS_MOST))
        return _replayed(request, rows, subjects_of(incident))


def _changes(request: Request) -> dict[str, str]:
    stated = [one.partition("=") for one in request.query_params.getlist("set")]
    if wrong := [name for name, sign, _ in stated if not sign]:
        raise InvalidInput(field="set", rule="form", message=f"{wrong[0][:80]!r} is not of the form name=value")
    return {name: value for name, _, value in stated}


def _replayed(request: Request, rows: list[RecordedRound], about: list[str]) -> Response:
    changes = _changes(request)
    notes = [NOT_RECORDED, EACH_ON_ITS_OWN] if changes else []
    try:
        with FORECASTS.take(request.user.get_username()) as has_time:
            rounds = _rounds(rows, changes, about, notes, has_time)
    except InvalidSetting as wrong:
        raise InvalidInput(field="set", rule="setting", message=str(wrong)) from None
    except CannotDecode as wrong:
        raise Conflict(str(wrong)) from None
    same = all(one["same"] for one in rounds)
    return Response(ReplaySerializer({"settings": changes, "rounds": rounds, "same": same, "notes": notes}).data)


def _rounds(
    rows: list[RecordedRound], changes: Mapping[str, str], about: list[str], notes: list[str], has_time: HasTime
) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = []
    of_loop = changes_by_loop(LOOPS.values(), changes)
    for row, one in rounds_decoded(rows, LOOPS):
        if not has_time():
            notes.append(f"Only the first {len(shown)} of {len(rows)} rounds: the time of this request is used up.")
            break
        done = replay(LOOPS[row.loop], one, of_loop[row.loop])
        decisions = _shown(LOOPS[row.loop], done, about)
        known = {"id": row.pk, "loop": row.loop, "at": row.at, "release": row.release}
        shown.append({**known, "same": done.is_same, "decisions": decisions})
    if not rows:
        notes.append("No recorded round is about it: nothing was decided, or its recording was deleted.")
    return sorted(shown, key=lambda one: one["id"])


def _shown(loop: RecordedLoop, done: ReplayedRound, about: list[str]) -> list[dict[str, Any]]:
    """Decisions about the incident, and all that differ."""
    then, now = loop.explain(done.round), loop.explain(done.decided_on)
    found = []
    for one in done.compared:
        if not loop.is_told(one.decision):
            continue
        reason = (then if one.recorded else now)(one.decision, one.planner)
        outcome = Outcome.SAME if one.recorded and one.replayed else Outcome.GONE if one.recorded else Outcome.NEW
        if not about or outcome is not Outcome.SAME or set(about) & set(reason.subjects):
            found.append({"outcome": outcome.value, "applied": one.applied, **asdict(reason)})
    return found[:DECISIONS_MOST]


def _why(kind: str) -> type[WhyViewSet]:
    return type(f"{kind.title()}WhyViewSet", (WhyViewSet,), {"kind": kind, "__doc__": f"Why a {kind} is as it is."})


ROUTES = (
    *((f"why/{kind}", _why(kind), f"why-{kind}") for kind in EXPLAINED),
    ("replay/rounds", ReplayRoundViewSet, "replayed-round"),
    ("replay/incidents", ReplayIncidentViewSet, "replayed-incident"),
)
