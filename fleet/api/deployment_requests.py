"""Bodies of requests about deployments. Types and ranges are checked here; what values mean is for the services."""

from collections.abc import Mapping
from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from engine_agent.protocol.states import ServingClass
from fleet.planning.autoscaling.policy import CELLS_MOST, InvalidScaling, cells_as_json, parse_cells
from fleet.planning.claims import PRIORITY_MOST, Preempts
from fleet.planning.markets import Market
from fleet.planning.states import choices
from kernel.rest.serializers import StrictSerializer

DRAIN_DEADLINE_MAX_S = 24 * 3600.0
NAME = r"^[A-Za-z0-9][-A-Za-z0-9_]*\Z"
TEAM = NAME


CELLS_SCHEMA = {
    "oneOf": [
        {"type": "integer", "minimum": 0, "maximum": CELLS_MOST},
        {
            "type": "object",
            "properties": {end: {"type": "integer", "minimum": 1, "maximum": CELLS_MOST} for end in ("min", "max")},
            "required": ["min", "max"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {
                role: {"type": "integer", "minimum": 0, "maximum": CELLS_MOST}
                for role in ("prefill", "decode", "mixed")
            },
            "required": ["prefill", "decode"],
            "additionalProperties": False,
        },
    ]
}


@extend_schema_field(CELLS_SCHEMA)
class CellsField(serializers.Field[Any, Any, Any, Any]):
    """A number of cells, a range of them as `{"min": 2, "max": 8}`, or cells by role as
    `{"prefill": 1, "decode": 3}`."""

    number = serializers.IntegerField(
        min_value=0,
        max_value=CELLS_MOST,
        error_messages={
            "invalid": "A valid integer is required, or an object with min and max, or one with prefill and decode."
        },
    )

    def to_internal_value(self, data: Any) -> int | dict[str, int]:
        if not isinstance(data, Mapping):
            return int(self.number.run_validation(data))
        try:
            return cells_as_json(parse_cells(data, "cells"))
        except InvalidScaling as wrong:
            raise serializers.ValidationError(str(wrong), "range") from None


def _by_type() -> serializers.DictField:
    return serializers.DictField(
        child=serializers.DictField(child=serializers.IntegerField(min_value=0, max_value=CELLS_MOST)),
        required=False,
        help_text="Region -> instance type -> how many of its cells should be on it; the rest is wherever is best. In "
        "a change, other regions stay as they are, and an empty object leaves all cells of a region to that.",
    )


class WantedCellsSerializer(StrictSerializer):
    """How many cells a region should have, or within which range the autoscaler sets their number."""

    region = serializers.CharField(max_length=64)
    cells = CellsField(
        help_text="A number, which ends a range and roles; `min` and `max`; or `prefill` and `decode`, and `mixed` "
        "where there are such cells."
    )


def _each_once(wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = [place["region"] for place in wanted]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise serializers.ValidationError(f"each region once; more than once here: {', '.join(twice)}", "unique")
    return wanted


class ScaleSerializer(StrictSerializer):
    """Regions that are not named stay as they are."""

    regions = serializers.ListField(child=WantedCellsSerializer(), min_length=1)
    by_type = _by_type()

    def validate_regions(self, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return _each_once(wanted)


def _instance_types(**options: Any) -> serializers.ListField:
    return serializers.ListField(
        child=serializers.CharField(max_length=64),
        min_length=1,
        help_text="That its cells may be on, the preferred first. Each cell is on one of them.",
        **options,
    )


class _Columns(StrictSerializer):
    serving_class = serializers.ChoiceField(choices=choices(ServingClass), required=False)
    drain_deadline_s = serializers.FloatField(
        min_value=0, max_value=DRAIN_DEADLINE_MAX_S, required=False, help_text="How long a drained cell may finish."
    )
    update_policy = serializers.DictField(
        required=False, help_text="What differs from the defaults or, in a change, from the current policy."
    )

    slo = serializers.DictField(
        required=False,
        help_text="What differs from its serving class: `availability`, `ttft_ms` and the share that must keep it, "
        "`ttft_share`.",
    )
    scaling = serializers.DictField(
        required=False,
        help_text="How it is scaled where cells are a range: what differs from the defaults or, in a change, from the "
        "current policy: `mode` (`shadow` or `act`), `target_utilisation`, `slo_burn`, `itl_p95_ms`, `down_after_s`, "
        "`start_up_s`, `budget_per_hour`, `roles` (`stated` or `planned`), `itl_p99_ms`, and `schedule` as a whole.",
    )
    markets = serializers.ListField(
        child=serializers.CharField(max_length=16),
        max_length=len(Market),
        required=False,
        help_text=f"In which its machines may be bought, of: {', '.join(Market)}; empty: any.",
    )

    team = serializers.RegexField(
        TEAM,
        max_length=64,
        required=False,
        allow_blank=True,
        help_text="Whose quota its machines count against; empty: nobody's.",
    )
    priority = serializers.IntegerField(
        min_value=0,
        max_value=PRIORITY_MOST,
        required=False,
        allow_null=True,
        help_text="Who gets machines first when they are short: the higher. Null: as its serving class has it.",
    )
    preemptible = serializers.BooleanField(
        required=False,
        allow_null=True,
        help_text="Whether others may take its cells below the start of its range, too. Null: batch lets them.",
    )
    preempts = serializers.ChoiceField(
        choices=choices(Preempts),
        required=False,
        help_text="For which of its cells it takes machines of lower priorities: `min`, those that its range begins "
        "with or that a person set; `need`, all; `nothing`.",
    )

    by_type = _by_type()

    def validate_preempts(self, value: str) -> str:
        return Preempts(value).value

    def validate_serving_class(self, value: str) -> str:
        return ServingClass(value).value


class ChangeDeploymentSerializer(_Columns):
    """Whatever is left out stays as it is. Another model version comes by a rollout."""

    regions = serializers.ListField(
        child=WantedCellsSerializer(), min_length=1, required=False, help_text="Others stay as they are."
    )
    instance_types = _instance_types(required=False)

    class Meta:
        examples = {"regions": [{"region": "us-west-2", "cells": 3}]}

    def validate_regions(self, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return _each_once(wanted)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        if not attrs:
            allowed = ", ".join(self.fields)
            message = f"changes nothing; give one of: {allowed}"
            raise serializers.ValidationError({"regions": serializers.ErrorDetail(message, "required")})
        return attrs


class CreateDeploymentSerializer(_Columns):
    name = serializers.RegexField(NAME, max_length=96, help_text="Letters, digits, `-` and `_`; it never changes.")
    model_version = serializers.CharField(max_length=170, help_text="`model@version`")
    instance_types = _instance_types()
    regions = serializers.ListField(child=WantedCellsSerializer(), min_length=1)
    allow_unreleased = serializers.BooleanField(
        required=False, default=False, help_text="Take a validated version that is not released."
    )

    class Meta:
        examples = {"update_policy": {"canary_bake_s": 60.0}}

    def validate_regions(self, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return _each_once(wanted)
