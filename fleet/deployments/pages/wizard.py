"""The wizard of deployments: what fits on which instance types, spare nodes, cost per hour and measured latency. It
decides nothing: the document is checked and applied by services."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from django.urls import reverse

from controlplane.api.apply.planning import Kind
from controlplane.dashboard.fragments import PageRequest
from controlplane.dashboard.wizards import (
    Documents,
    Facts,
    Input,
    InputKind,
    Option,
    Step,
    Typed,
    Values,
    Wizard,
    document,
    nested,
)
from fleet.autoscaling.planning.policy import cells_from_text
from fleet.capacity.planning.pools import Market
from fleet.capacity.planning.rates import MachinePrice
from fleet.capacity.selectors import machine_prices
from fleet.deployments.models import Deployment
from fleet.nodes.selectors import spare_nodes
from fleet.regions.models import Region
from kernel import clock
from kernel.refusals import InvalidInput
from models_registry.benchmarks.models import Benchmark
from models_registry.benchmarks.planning.workload import BenchmarkState
from models_registry.benchmarks.selectors import benchmarks_described, figures_at_goodput, whole_benchmarks
from models_registry.instance_types.planner import InstanceShape
from models_registry.instance_types.selectors import instance_shapes
from models_registry.versions.models import ModelVersion, VersionState
from models_registry.versions.planning.engine_arguments import nodes_per_cell
from models_registry.versions.planning.lifecycle import Checkpoints, fitted_rendering
from models_registry.versions.planning.spec import InvalidVersion
from models_registry.versions.selectors import checkpoints_of, version_by_reference

VERSIONS_OFFERED = 300
BENCHMARKS_READ = 50
MAX_REGIONS = 100
FITS_SHOWN = 40
SETTINGS = (
    "serving_class", "drain_deadline_s", "markets", "team", "priority", "preemptible", "preempts", "update_policy",
    "scaling", "chain",
)  # fmt: skip


# --- what fits -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fit:
    """A cell of the version on one instance type in a region. `fitting`: cells for which there are spare nodes now.
    `ttft_ms`: the median of its newest benchmark on that type, None if it was not measured."""

    region: str
    instance_type: str
    nodes: int
    spare: int
    price: MachinePrice
    ttft_ms: float | None
    problem: str

    @property
    def fitting(self) -> int:
        return 0 if self.problem else self.spare // self.nodes

    @property
    def dollars_per_hour(self) -> float | None:
        return None if self.price.usd is None else self.price.usd * self.nodes


@dataclass(frozen=True, slots=True)
class Fits:
    """`rows` of the chosen version by type and region, the best first, and how many are `hidden`. `total`: dollars per
    hour of the stated cells on the first type, None if a price is unknown."""

    rows: tuple[Fit, ...] = ()
    hidden: int = 0
    cells: int = 0
    total: float | None = None


def _version(typed: Typed) -> ModelVersion | None:
    return version_by_reference(ModelVersion.objects.all(), typed.text("model_version"))


def _fits(version: ModelVersion) -> tuple[Fit, ...]:
    """Six queries."""
    spec, shapes, prices, spares = version.spec(), instance_shapes(), machine_prices(), spare_nodes()
    checkpoints, measured, now = checkpoints_of(spec), _measured_ttft_ms(version), clock.now()
    regions, found = _regions_in_order(), []
    for kind in spec.instance_types:
        problem = _problem(version, shapes.get(kind), checkpoints)
        nodes = 1 if problem else nodes_per_cell(spec, kind)
        for region in regions:
            spare, price = spares.get((region, kind), 0), prices.of(region, kind, now)
            found.append(Fit(region, kind, nodes, spare, price, measured.get(kind), problem))
    return tuple(sorted(found, key=_rank))


def _rank(fit: Fit) -> tuple[bool, bool, float, str, str]:
    cost = math.inf if fit.dollars_per_hour is None else fit.dollars_per_hour
    return bool(fit.problem), not fit.fitting, cost, fit.instance_type, fit.region


def _regions_in_order() -> list[str]:
    return list(Region.objects.order_by("position", "name").values_list("name", flat=True)[:MAX_REGIONS])


def _problem(version: ModelVersion, shape: InstanceShape | None, checkpoints: Checkpoints) -> str:
    if shape is None:
        return "this instance type does not exist"
    try:
        fitted_rendering(version.spec(), shape, checkpoints)
    except InvalidVersion as error:
        return str(error)
    return ""


def _measured_ttft_ms(version: ModelVersion) -> dict[str, float]:
    rows = whole_benchmarks(benchmarks_described()).filter(version=version, state=BenchmarkState.DONE.value)
    found: dict[str, float] = {}
    for row in rows.order_by("-id")[:BENCHMARKS_READ]:
        if (ttft := _ttft_ms(row)) is not None:
            found.setdefault(row.instance_type, ttft)
    return found


def _ttft_ms(row: Benchmark) -> float | None:
    figures = figures_at_goodput(row)
    return None if figures is None else figures.get("ttft_p50_ms")


def _fit_facts(typed: Typed) -> Fits:
    version = _version(typed)
    if version is None:
        return Fits()
    rows = _fits(version)
    cells = {row["region"]: _least(row.get("cells", "")) for row in typed.rows("regions") if row.get("region")}
    first = next(iter(typed.texts("instance_types")), "")
    costs = {row.region: row.dollars_per_hour for row in rows if row.instance_type == first}
    wanted = [(count, costs.get(region)) for region, count in cells.items() if count]
    total = None if any(cost is None for _, cost in wanted) else sum(count * (cost or 0) for count, cost in wanted)
    hidden = max(0, len(rows) - FITS_SHOWN)
    return Fits(rows[:FITS_SHOWN], hidden, sum(count for count, _ in wanted), total)


def _least(text: str) -> int:
    stated = cells_from_text(text.strip())
    if isinstance(stated, Mapping):
        return int(stated.get("min", sum(stated.values())))
    return stated or 0


# --- the document ----------------------------------------------------------------------------------------------------


def _documents(values: Values) -> Documents:
    spec = nested(values, ("model_version", "allow_unreleased", "instance_types"))
    spec["regions"] = list(_regions(values))
    spec |= nested(values, (*SETTINGS, "slo.ttft_ms", "slo.ttft_share", "slo.availability"))
    return [document(Kind.DEPLOYMENT, values["name"], spec)]


def _regions(values: Values) -> Iterator[dict[str, object]]:
    for row in values["regions"]:
        if (text := str(row.get("cells", ""))) in {"", "0"}:
            continue
        stated = cells_from_text(text)
        if stated is None:
            message = f"{text[:20]!r} cells in {row['region']}: write 3, 2-8 or 1p+3d"
            raise InvalidInput(field="regions", rule="cells", message=message)
        yield {"region": row["region"], "cells": stated}


def _start(request: PageRequest) -> dict[str, str]:
    """The version of the URL or the newest one, and one cell on a type with spare nodes, else on the cheapest."""
    offered = _versions_offered()
    reference = request.text("model_version") or next((row.reference for row in offered), "")
    version = version_by_reference(ModelVersion.objects.all(), reference)
    regions = _regions_in_order()
    texts = {f"regions-{index}-region": name for index, name in enumerate(regions)}
    if version is None:
        return texts
    texts |= {"model_version": reference, "name": _free_name(version.model_id)}
    if version.state == VersionState.VALIDATED:
        texts["allow_unreleased"] = "on"
    if best := next((fit for fit in _fits(version) if not fit.problem), None):
        texts["instance_types"] = best.instance_type
        texts[f"regions-{regions.index(best.region)}-cells"] = "1"
    return texts


def _free_name(model: str) -> str:
    names = set(Deployment.objects.filter(name__startswith=model).values_list("name", flat=True))
    numbered = (f"{model}-{number}" for number in range(2, 1000))
    return model if model not in names else next((name for name in numbered if name not in names), "")


# --- the form --------------------------------------------------------------------------------------------------------


def _versions_offered() -> list[ModelVersion]:
    states = (VersionState.RELEASED.value, VersionState.VALIDATED.value)
    rows = ModelVersion.objects.filter(state__in=states).order_by("state", "-id")[:VERSIONS_OFFERED]
    return sorted(rows, key=lambda row: row.state != VersionState.RELEASED)


def _version_options(typed: Typed) -> list[Option]:
    found = [Option(row.reference, row.reference, row.state) for row in _versions_offered()]
    return found or [Option("", "no version is validated yet")]


def _type_options(typed: Typed) -> list[Option]:
    """The chosen types first, in their order, because the first is preferred."""
    version, chosen = _version(typed), typed.texts("instance_types")
    kinds = version.spec().instance_types if version else ()
    names = [*dict.fromkeys(kind for kind in chosen if kind), *(kind for kind in kinds if kind not in chosen)]
    return [Option(kind, kind, "" if kind in kinds else "not named by this version") for kind in names]


def _region_options(typed: Typed) -> list[Option]:
    return [Option(name) for name in _regions_in_order()]


def _market_options(typed: Typed) -> list[Option]:
    return [Option(market.value) for market in Market]


def _at(name: str, **more: object) -> Input:
    return Input(name=name, at=f"Deployment.{name}", **more)  # type: ignore[arg-type]


DEPLOYMENT_WIZARD = Wizard(
    title="New deployment",
    section="deployments",
    about="Serves a version under a name. Its cells are placed on spare nodes, or on machines that are launched.",
    steps=(
        Step(
            "Model",
            (
                _at("model_version", label="Version", kind=InputKind.CHOICE, options=_version_options, required=True,
                    help="Released and validated versions."),
                Input(name="name", at="Deployment.metadata.name", required=True,
                      help="Its name in requests; it cannot be changed."),
                _at("allow_unreleased", label="Accept a version that is validated but not released"),
            ),
        ),
        Step(
            "Machines and cells",
            (
                _at("instance_types", kind=InputKind.MANY, options=_type_options, follows=True, required=True,
                    placeholder="Choose a version first."),
                _at("regions", label="Cells", required=True, columns=(
                    Input(name="region", label="Region", required=True, suggests=True),
                    Input(name="cells", label="Cells", placeholder="0"),
                ), options=_region_options,
                    help="3; or 2-8, within which the load decides; or 1p+3d for prefill and decode cells."),
            ),
            facts=Facts("fleet/deployments/fits.html", _fit_facts),
        ),
        Step(
            "Service",
            (
                _at("serving_class"),
                Input(name="slo.ttft_ms", at="Deployment.slo", label="Objective for the first token, ms",
                      kind=InputKind.NUMBER, help="Default: that of its class."),
                Input(name="slo.ttft_share", label="Share of requests that keep it", kind=InputKind.NUMBER,
                      placeholder="0.95"),
                Input(name="slo.availability", label="Share of requests that succeed", kind=InputKind.NUMBER),
                _at("drain_deadline_s", label="Drain deadline, seconds"),
                _at("chain", placeholder='{"planner": "query-planner", "ttft_ms": 1500, "planner_ms": 300}'),
            ),
            folded=True,
        ),
        Step(
            "Sharing and policies",
            (
                _at("team"),
                _at("priority"),
                _at("preempts"),
                _at("markets", kind=InputKind.MANY, options=_market_options),
                _at("update_policy", placeholder='{"canary_bake_s": 60}'),
                _at("scaling", placeholder='{"mode": "act", "target_utilisation": 0.7}'),
            ),
            folded=True,
        ),
    ),
    documents=_documents,
    kinds=frozenset({Kind.DEPLOYMENT}),
    creates=frozenset({Kind.DEPLOYMENT}),
    url=lambda documents: reverse("deployment", args=(documents[-1]["metadata"]["name"],)),
    start=_start,
)  # fmt: skip
