"""The wizards of a deployment's policies: autoscaling with its schedule, updates, and traffic. They begin with the
values in force and decide nothing: services check and apply the documents."""

from collections.abc import Mapping
from typing import Any

from django.shortcuts import get_object_or_404
from django.urls import reverse

from controlplane.api.apply.planning import Kind
from controlplane.dashboard.fragments import PageRequest
from controlplane.dashboard.wizards import (
    Documents,
    Input,
    InputKind,
    Option,
    Options,
    Step,
    Typed,
    Values,
    Wizard,
    document,
    nested,
)
from engine_agent.protocol.request_limits import LIMIT_ROWS
from fleet.autoscaling.planning.policy import (
    RolesBy,
    ScalingMode,
    WakeOn,
    cells_from_text,
    cells_to_text,
    dimensions_from_text,
    dimensions_to_text,
    scaling_policy_as_json,
)
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.deployments.planner import GoodputMissing, UpdateStrategy, policy_as_json
from fleet.regions.models import Region
from kernel.refusals import InvalidInput
from models_registry.instance_types.selectors import instance_type_names
from traffic.region_shares.models import TrafficRule
from traffic.region_shares.planning.policy import TrafficPolicy, traffic_policy_as_json

NUMBER, CHOICE, CHECK = InputKind.NUMBER, InputKind.CHOICE, InputKind.CHECK
Texts = dict[str, str]


def _one_of(*values: str) -> Options:
    return lambda typed: [Option(value, value.replace("_", " ")) for value in values]


def _regions(typed: Typed) -> list[Option]:
    return [Option(name) for name in Region.objects.values_list("name", flat=True)]


def _types(typed: Typed) -> list[Option]:
    return [Option(name) for name in instance_type_names()]


def _deployments(typed: Typed) -> list[Option]:
    return [Option(name) for name in Deployment.objects.values_list("name", flat=True)]


def _name(kind: Kind) -> Input:
    """The deployment of the URL; the form keeps it."""
    at = f"{kind.value}.metadata.name"
    return Input(
        name="name", at=at, label="Deployment", kind=CHOICE, options=lambda typed: [Option(typed.text("name"))]
    )


def _url(documents: Documents) -> str:
    return reverse("deployment", args=(documents[0]["metadata"]["name"],))


def _text(value: Any) -> str:
    """A stored value as the text of an input; "" for null and for a switch that is off."""
    if value is None or value is False:
        return ""
    if value is True:
        return "on"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _texts(stored: Mapping[str, Any], path: str = "") -> Texts:
    """The texts of plain values, `gate.error_ratio` for those of a part. Lists are left out, and maps have no input."""
    texts: Texts = {}
    for name, value in stored.items():
        if isinstance(value, Mapping):
            texts |= _texts(value, f"{path}{name}.")
        elif not isinstance(value, list | tuple):
            texts[f"{path}{name}"] = _text(value)
    return texts


def _row_texts(name: str, rows: list[dict[str, Any]]) -> Texts:
    return {
        f"{name}-{index}-{column}": _text(value)
        for index, row in enumerate(rows)
        for column, value in row.items()
        if value not in (None, "")
    }


def _spec(values: Values, inputs: tuple[Input, ...], prefix: str = "") -> dict[str, Any]:
    """The whole policy: an empty number is null, and an empty switch is off."""
    names = [each.name for each in inputs]
    empty = {
        each.name: False if each.shown_as is CHECK else None for each in inputs if each.shown_as in (CHECK, NUMBER)
    }
    return nested({**empty, **values}, [name for name in names if name.startswith(prefix)])


# --- autoscaling -----------------------------------------------------------------------------------------------------


def _scaling(name: str, label: str, text: str = "", kind: InputKind = NUMBER, **more: Any) -> Input:
    return Input(name=name, at=f"Deployment.scaling.{name}", label=label, help=text, kind=kind, **more)


SCALING = (
    _scaling("mode", "Mode", "shadow records decisions; act carries them out.", CHOICE, required=True,
             options=_one_of(*(mode.value for mode in ScalingMode))),
    _scaling("target_utilisation", "Target", "Concurrent requests as a share of what a cell was tested for.",
             required=True),
    _scaling("down_after_s", "Cool-down, seconds", "Fewer cells must have been enough for this long.", required=True),
    _scaling("budget_per_hour", "Budget, $ per hour", "Of the machines of all its cells. It limits growth only."),
)  # fmt: skip
SIGNALS = (
    _scaling("slo_burn", "Burn rate of late first tokens", "Above it, over 5 minutes, a step is added. Empty: off."),
    _scaling("itl_p95_ms", "Inter-token latency p95, ms", "Above it, a step is added. Empty: off."),
    _scaling("start_up_s", "Start-up of a cell, seconds", "Empty: as measured."),
    _scaling("idle_s", "Idle time, seconds", "Without requests, before the last cell stops, if a range begins at 0.",
             required=True),
    _scaling("wake", "Wake", "What starts the first cell again.", CHOICE, required=True,
             options=_one_of(*(wake.value for wake in WakeOn))),
    _scaling("hold_s", "Hold, seconds", "How long requests wait for the first cell. Empty: two start-ups."),
    _scaling("roles", "Prefill and decode", "Who chooses how many cells do which.", CHOICE, required=True,
             options=_one_of(*(roles.value for roles in RolesBy))),
    _scaling("itl_p99_ms", "Inter-token latency p99, ms", "Limit for the plan of prefill and decode.", required=True),
)  # fmt: skip
SCHEDULE = _scaling(
    "schedule", "Windows", "Minimum of cells from each time of the cron expression on.", InputKind.ROWS,
    options=_regions, columns=(
        Input(name="cron", label="Starts (cron)", placeholder="30 7 * * MON-FRI"),
        Input(name="for_s", label="Seconds", kind=NUMBER, required=True, placeholder="36000"),
        Input(name="cells", label="Least cells", kind=NUMBER, required=True),
        Input(name="time_zone", label="Time zone", placeholder="UTC"),
        Input(name="region", label="Region", placeholder="all", suggests=True),
    ),
)  # fmt: skip
METRICS = _scaling(
    "metrics", "Metrics of CloudWatch", "Cells = value / per cell, in AWS. Without a recent value no cell is removed.",
    InputKind.ROWS, options=_regions, columns=(
        Input(name="namespace", label="Namespace", required=True, placeholder="AWS/SQS"),
        Input(name="metric", label="Metric", required=True, placeholder="ApproximateNumberOfMessagesVisible"),
        Input(name="dimensions", label="Dimensions", placeholder="QueueName=jobs"),
        Input(name="statistic", label="Statistic", placeholder="Average"),
        Input(name="period_s", label="Period, seconds", kind=NUMBER, placeholder="60"),
        Input(name="per_cell", label="Per cell", kind=NUMBER, required=True),
        Input(name="region", label="Region", placeholder="all", suggests=True),
    ),
)  # fmt: skip
CELLS = Input(
    name="regions", at="Deployment.regions", label="Cells", options=_regions, suggests=True,
    help="2-8 is a range within which the load decides; 3 is fixed.", columns=(
        Input(name="region", label="Region", required=True, suggests=True),
        Input(name="cells", label="Cells", required=True, placeholder="2-8"),
    ),
)  # fmt: skip


def _scaling_start(request: PageRequest) -> Texts:
    deployment = get_object_or_404(Deployment, pk=request.key)
    stored = scaling_policy_as_json(deployment.scaling_policy())
    places = DeploymentRegion.objects.filter(deployment=deployment).order_by("region_id")
    cells = [
        {"region": place.region_id, "cells": cells_to_text(place.stated(plans_roles=deployment.plans_roles))}
        for place in places
    ]
    return {
        "name": deployment.pk,
        **_texts(stored),
        **_row_texts("schedule", list(stored["schedule"])),
        **_row_texts(
            "metrics",
            [{**row, "dimensions": dimensions_to_text(row["dimensions"])} for row in stored["metrics"]],
        ),
        **_row_texts("regions", cells),
    }


def _scaling_documents(values: Values) -> Documents:
    lists = {"schedule": values.get("schedule", []), "metrics": [_metric(row) for row in values.get("metrics", [])]}
    scaling = {**_spec(values, (*SCALING, *SIGNALS)), **lists}
    spec: dict[str, Any] = {"scaling": scaling}
    if rows := values.get("regions"):
        spec["regions"] = [{"region": row["region"], "cells": _cells(row)} for row in rows]
    return [document(Kind.DEPLOYMENT, values["name"], spec)]


def _metric(row: Mapping[str, Any]) -> dict[str, Any]:
    try:
        dimensions = dimensions_from_text(str(row.get("dimensions", "")))
    except ValueError as error:
        raise InvalidInput(field="metrics", rule="dimensions", message=str(error)) from None
    return {**{name: value for name, value in row.items() if value not in (None, "")}, "dimensions": dimensions}


def _cells(row: Mapping[str, Any]) -> Any:
    stated = cells_from_text(str(row["cells"]))
    if stated is None:
        message = f"{str(row['cells'])[:20]!r} cells in {row['region']}: write 3, 2-8 or 1p+3d"
        raise InvalidInput(field="regions", rule="cells", message=message)
    return stated


SCALING_WIZARD = Wizard(
    title="Autoscaling",
    section="deployments",
    about="How the load of a deployment decides its number of cells.",
    steps=(
        Step("Range", (_name(Kind.DEPLOYMENT), CELLS)),
        Step("Rule", SCALING),
        Step("Schedule", (SCHEDULE,)),
        Step("Metrics", (METRICS,), folded=True),
        Step("Signals and idle time", SIGNALS, folded=True),
    ),
    documents=_scaling_documents,
    kinds=frozenset({Kind.DEPLOYMENT}),
    url=_url,
    start=_scaling_start,
)


# --- updates ---------------------------------------------------------------------------------------------------------


def _update(name: str, label: str, text: str = "", kind: InputKind = NUMBER, **more: Any) -> Input:
    return Input(name=name, at=f"Deployment.update_policy.{name}", label=label, help=text, kind=kind, **more)


UPDATES = (
    _update("strategy", "Strategy", "in place: on the same nodes; surge: a new cell first.", CHOICE, required=True,
            options=_one_of(*(strategy.value for strategy in UpdateStrategy))),
    _update("max_unavailable", "Most cells down", "Per region, failed cells included.", required=True),
    _update("surge", "Extra cells", "Allowed above the target.", required=True),
    _update("canary", "Begin with a canary cell", kind=CHECK),
    _update("waves_percent", "Waves, percent", "Growing, the last 100.", InputKind.TEXT, required=True),
    _update("canary_bake_s", "Bake of the canary, seconds", required=True),
    _update("bake_s", "Bake of a wave, seconds", required=True),
    _update("min_healthy_s", "Healthy for, seconds", "Before a cell counts as updated.", required=True),
    _update("max_failed_cells", "Failures", "Of updated cells; so many end the rollout.", required=True),
    _update("max_failed_percent", "Failures, percent", "Of updated cells; ends the rollout if it is more cells.",
            required=True),
    _update("progress_deadline_s", "Deadline, seconds", "Pauses a rollout without progress.", required=True),
    _update("auto_rollback", "Roll back automatically", kind=CHECK),
)  # fmt: skip
GATE = (
    _update("gate.error_ratio", "Errors, ratio", "Of updated to other cells.", required=True),
    _update("gate.latency_ratio", "Latency, ratio", "Of updated to other cells.", required=True),
    _update("gate.min_samples", "Least samples", required=True),
    _update("gate.significance", "Significance", "A difference counts below this chance.", required=True),
    _update("gate.goodput_ratio", "Goodput, ratio", "Of new to old in benchmarks; 0: off.", required=True),
    _update("gate.goodput_missing", "Without benchmarks", kind=CHOICE, required=True,
            options=_one_of(*(choice.value for choice in GoodputMissing))),
)  # fmt: skip


def _update_start(request: PageRequest) -> Texts:
    deployment = get_object_or_404(Deployment, pk=request.key)
    stored = policy_as_json(deployment.policy())
    waves = ", ".join(map(str, stored["waves_percent"]))
    return {"name": deployment.pk, **_texts(stored), "waves_percent": waves}


def _update_documents(values: Values) -> Documents:
    spec = _spec(values, (*UPDATES, *GATE))
    waves = [part.strip() for part in str(values["waves_percent"]).split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 4 for part in waves):
        message = "Waves: write percentages with commas, such as 10, 25, 50, 100"
        raise InvalidInput(field="waves_percent", rule="waves", message=message)
    spec["waves_percent"] = [int(part) for part in waves]
    return [document(Kind.DEPLOYMENT, values["name"], {"update_policy": spec})]


UPDATE_WIZARD = Wizard(
    title="Update policy",
    section="deployments",
    about="How rollouts of a deployment proceed. Active rollouts keep the policy that they started with.",
    steps=(Step("Updates", (_name(Kind.DEPLOYMENT), *UPDATES)), Step("Gate", GATE, folded=True)),
    documents=_update_documents,
    kinds=frozenset({Kind.DEPLOYMENT}),
    url=_url,
    start=_update_start,
)


# --- chain -----------------------------------------------------------------------------------------------------------


def _chain(name: str, label: str, text: str = "", kind: InputKind = NUMBER, **more: Any) -> Input:
    return Input(name=name, at=f"Deployment.chain.{name}", label=label, help=text, kind=kind, **more)


def _planners(typed: Typed) -> list[Option]:
    return [Option("", "none"), *(each for each in _deployments(typed) if each.value != typed.text("name"))]


CHAIN = (
    _chain("planner", "Planner", "The deployment that applications call before this one.", CHOICE, options=_planners),
    _chain("ttft_ms", "First token, ms", "From the planner's request to the first token of this deployment's answer."),
    _chain("ttft_share", "Share of requests that keep it", "Default: 0.99."),
    _chain("planner_ms", "Part of the planner, ms", "Empty: not stated."),
)


def _chain_start(request: PageRequest) -> Texts:
    deployment = get_object_or_404(Deployment, pk=request.key)
    return {"name": deployment.pk, **_texts(deployment.chain)}


def _chain_documents(values: Values) -> Documents:
    if not values.get("name"):
        raise InvalidInput(field="name", rule="required", message="Deployment: name it")
    stated = {each.name: values[each.name] for each in CHAIN if values.get(each.name) not in (None, "")}
    return [document(Kind.DEPLOYMENT, values["name"], {"chain": stated if "planner" in stated else {}})]


CHAIN_WIZARD = Wizard(
    title="Chain",
    section="deployments",
    about="A planner, such as one that rewrites queries, and an objective for both. Applications call the planner and "
    "then this deployment, with the same traceparent.",
    steps=(Step("Chain", (_name(Kind.DEPLOYMENT), *CHAIN)),),
    documents=_chain_documents,
    kinds=frozenset({Kind.DEPLOYMENT}),
    url=_url,
    start=_chain_start,
)


# --- traffic ---------------------------------------------------------------------------------------------------------


def _traffic(name: str, label: str = "", **more: Any) -> Input:
    return Input(name=name, at=f"TrafficPolicy.{name}", label=label, **more)


def _pairs(name: str, label: str, first: str, second: str, options: Options, kind: InputKind = NUMBER) -> Input:
    """A map as a table: `key` and `value`."""
    columns = (
        Input(name="key", label=first, required=True, suggests=True),
        Input(name="value", label=second, kind=kind, required=True),
    )
    return _traffic(name, label, columns=columns, options=options)


MAPS = (
    _pairs("cost", "Price of regions", "Region", "Relative price", _regions),
    _pairs("residency", "Residency", "Origin", "Regions that may serve, with commas", _regions, InputKind.TEXT),
    _pairs("split", "Split", "Deployment", "Weight", _deployments),
    _pairs("tested_by_type", "Tested concurrency by type", "Instance type", "Requests", _types),
)
PLACES = (
    _traffic("utilisation_cap", "Utilisation cap", required=True),
    _traffic("cost_utilisation", "Cheaper up to", required=True),
    _traffic("cost_latency_ms", "Cheaper within, ms", required=True),
    _traffic("tested_concurrency", "Tested concurrency"),
)
ROUTING = (
    _traffic("routing", required=True),
    _traffic("load_bound", "Load bound"),
    _traffic("split_sticky", "Conversations stay on their deployment"),
    _traffic("shared_caches", "Tenants may share caches"),
    _traffic("continuation", "Streams continue at other cells"),
)
LIMITS = tuple(
    Input(
        name=f"request_limits.{row.name}",
        at=f"TrafficPolicy.request_limits.{row.name}",
        label=row.name.replace("_", " ").capitalize(),
        help=f"Maximum {row.counts}.",
        kind=NUMBER,
        required=True,
    )
    for row in LIMIT_ROWS
)


def _traffic_start(request: PageRequest) -> Texts:
    deployment = get_object_or_404(Deployment, pk=request.key)
    rule = TrafficRule.objects.filter(deployment=deployment).first()
    stored = traffic_policy_as_json(rule.policy() if rule else TrafficPolicy())
    texts = {"name": deployment.pk, **_texts(stored)}
    for each in MAPS:
        pairs = stored[each.name].items()
        texts |= _row_texts(
            each.name,
            [{"key": key, "value": ", ".join(value) if isinstance(value, list) else value} for key, value in pairs],
        )
    return texts


def _traffic_documents(values: Values) -> Documents:
    spec = _spec(values, (*PLACES, *ROUTING, *LIMITS))
    for each in MAPS:
        spec[each.name] = {row["key"]: row["value"] for row in values.get(each.name, [])}
    spec["residency"] = {
        origin: [name for part in str(regions).split(",") if (name := part.strip())]
        for origin, regions in spec["residency"].items()
    }
    return [document(Kind.TRAFFIC_POLICY, values["name"], spec)]


TRAFFIC_WIZARD = Wizard(
    title="Traffic policy",
    section="deployments",
    about="Where requests of a deployment may be served, at which price, and how full regions may get.",
    steps=(
        Step("Regions", (_name(Kind.TRAFFIC_POLICY), *PLACES, *MAPS[:2])),
        Step("Routing", (*ROUTING, *MAPS[2:]), folded=True),
        Step("Limits of a request", LIMITS, folded=True),
    ),
    documents=_traffic_documents,
    kinds=frozenset({Kind.TRAFFIC_POLICY}),
    url=_url,
    start=_traffic_start,
)
