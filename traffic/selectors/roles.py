"""Loads what the planner of roles looks at: places whose roles are planned, what their cells count, how fast steps are
and what is expected. In a constant number of queries."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import F

from engine_agent.protocol.states import CellRole
from fleet.models import Deployment, DeploymentRegion, NodeReport, RoleState, Rollout
from fleet.planning.autoscaling.policy import InvalidScaling, RolesBy, ScalingPolicy
from fleet.planning.role_split import RoleSplit, split_within
from fleet.planning.roles.capacity import RoleLimits, RolePace
from fleet.planning.roles.counted import Counted, CountedCell, demand_between, handover_s
from fleet.planning.roles.ratio import RatioView
from fleet.selectors.autoscaling import is_acting, scaling_switch
from fleet.selectors.rollout import ACTIVE
from models_registry.planning.roles import role_spec
from models_registry.planning.version_spec import InvalidVersion, VersionSpec
from traffic.models import TokenFit
from traffic.planning.demand import Place
from traffic.planning.token_fit import FIT_KEPT
from traffic.selectors.demand import FRESH_FOR, expected_loads

REPLAN_S = 300.0
"""Between two decisions of a place, unless the number of its cells changed."""
HANDOVER_S = 0.005
HANDOVER_TOKEN_S = 0.33e6 / 12.5e9
"""Until a handover was measured: 0.33 MB a token (a 70B model with grouped heads in 16 bits) at 100 Gbit/s."""
CHUNK_OPTIONS = ("max_num_batched_tokens", "prefill_chunk_tokens")
CHUNK_TOKENS = 2048
"""Prompt tokens of a step where the version states none: vLLM's default for serving."""


@dataclass(frozen=True, slots=True)
class PlannedPlace:
    """A place as the planner takes it, and its row as it was read. `figures`: what was seen, by name."""

    row: DeploymentRegion
    view: RatioView
    acting: bool
    figures: Mapping[str, float | None]
    counted: Mapping[str, Any]


def planned_places(now: datetime) -> list[PlannedPlace]:
    rows = DeploymentRegion.objects.filter(deployment__scaling__roles=RolesBy.PLANNED.value)
    rows = rows.select_related("deployment__model_version", "role_state").order_by("deployment_id", "region_id")
    due = [row for row in rows if _is_due(row, now)]
    if not due:
        return []
    names = {row.deployment_id for row in due}
    counted, is_paused = _counted(names, now), scaling_switch().paused
    expected = expected_loads(now, dict.fromkeys(names, REPLAN_S))
    rolling = set(
        Rollout.objects.filter(deployment__in=names, state__in=ACTIVE).values_list("deployment_id", flat=True)
    )
    fits = _fits({row.deployment.model_version.reference for row in due}, now)
    return [
        _planned(
            row, policy, counted, expected, fits, is_rolling=row.deployment_id in rolling, is_paused=is_paused, now=now
        )
        for row in due
        if (policy := _policy(row.deployment)) is not None
    ]


def role_state(place: DeploymentRegion) -> RoleState | None:
    """The last look at a place; None: there was none yet."""
    return getattr(place, "role_state", None)


def _is_due(row: DeploymentRegion, now: datetime) -> bool:
    state = role_state(row)
    return state is None or state.wanted.total != row.cells or now - state.looked_at >= timedelta(seconds=REPLAN_S)


def _policy(deployment: Deployment) -> ScalingPolicy | None:
    """None: it cannot be read, and nothing is done."""
    try:
        return deployment.scaling_policy()
    except InvalidScaling:
        return None


def _planned(
    row: DeploymentRegion,
    policy: ScalingPolicy,
    counted: Mapping[Place, Counted],
    expected: Mapping[Place, float],
    fits: Mapping[tuple[str, str], TokenFit],
    *,
    is_rolling: bool,
    is_paused: bool,
    now: datetime,
) -> PlannedPlace:
    place, state, deployment = (row.deployment_id, row.region_id), role_state(row), row.deployment
    there = counted.get(place, {})
    before = _counted_before(state)
    passed_s = (now - state.looked_at).total_seconds() if state else 0.0
    demand = demand_between(before, there, passed_s, expected.get(place))
    pace = _pace(fits.get((deployment.model_version.reference, deployment.instance_types[0])), deployment, there)
    acting = is_acting(policy, is_paused)
    view = RatioView(
        cells=row.cells,
        current=_current(row, state, acting=acting),
        limits=RoleLimits(deployment.objective().ttft_ms / 1000, policy.itl_p99_ms / 1000),
        pace=pace,
        demand=demand,
        is_rolling=is_rolling,
        from_tokens=state.from_tokens if state else None,
    )
    figures = {**(asdict(demand) if demand else {}), **(asdict(pace) if pace else {})}
    return PlannedPlace(row, view, acting, figures, {name: asdict(cell) for name, cell in there.items()})


def _current(row: DeploymentRegion, state: RoleState | None, *, acting: bool) -> RoleSplit:
    """In shadow the last decision stands by itself."""
    if state is not None and not acting:
        return state.wanted
    return split_within(row.cells, row.prefill, row.decode)


def _counted_before(state: RoleState | None) -> Counted:
    stored: dict[str, dict[str, Any]] = state.counted if state else {}
    return {name: CountedCell(**{**cell, "role": CellRole(cell["role"])}) for name, cell in stored.items()}


def _counted(deployments: Iterable[str], now: datetime) -> dict[Place, dict[str, CountedCell]]:
    """What leaders report of their own cell now."""
    cell = "node__member__cell__"
    reports = NodeReport.objects.filter(
        last_seen_at__gte=now - FRESH_FOR,
        node__member__rank=0,
        node__member__cell__deployment__in=deployments,
        cell=F("node__member__cell_id"),
        generation=F("node__member__cell__generation"),
        load__isnull=False,
    )
    found: dict[Place, dict[str, CountedCell]] = defaultdict(dict)
    columns = (f"{cell}deployment_id", f"{cell}region_id", "cell", "generation", f"{cell}role", "load")
    for deployment, region, name, generation, role, load in reports.values_list(*columns):
        found[deployment, region][name] = _counted_cell(generation, CellRole(role), load)
    return found


def _counted_cell(generation: int, role: CellRole, load: Mapping[str, Any]) -> CountedCell:
    usage, handovers = load.get("usage") or (), load.get("handovers") or {}
    transfer_ms = handovers.get("transfer_p50_ms")
    return CountedCell(
        generation=generation,
        role=role,
        requests=sum(row.get("requests_total", 0) for row in usage),
        prompt_tokens=sum(row.get("prompt_tokens_total", 0) for row in usage),
        cached_tokens=sum(row.get("cached_tokens_total", 0) for row in usage),
        completion_tokens=sum(row.get("completion_tokens_total", 0) for row in usage),
        read_tokens=handovers.get("prefill_tokens_total", 0),
        in_flight=max(0, load.get("in_flight", 0)),
        handover_s=None if transfer_ms is None else transfer_ms / 1000,
    )


def _fits(versions: Iterable[str], now: datetime) -> dict[tuple[str, str], TokenFit]:
    rows = TokenFit.objects.filter(version__in=list(versions), fitted_at__gte=now - timedelta(days=FIT_KEPT))
    return {(row.version, row.instance_type): row for row in rows}


def _pace(fit: TokenFit | None, deployment: Deployment, there: Counted) -> RolePace | None:
    """As cells were measured; None: nobody has."""
    if fit is None:
        return None
    spec, kind = deployment.model_version.spec(), deployment.instance_types[0]
    try:
        prefill, decode = (role_spec(spec, role, kind) for role in (CellRole.PREFILL, CellRole.DECODE))
    except InvalidVersion:
        return None
    measured = handover_s(there)
    return RolePace(
        step_s=fit.step_us / 1e6,
        sequence_s=fit.sequence_us / 1e6,
        prompt_token_s=fit.prompt_us / 1e6,
        chunk_tokens=_chunk_tokens(prefill),
        most_at_once=decode.max_concurrency,
        handover_s=HANDOVER_S if measured is None else measured,
        handover_token_s=HANDOVER_TOKEN_S if measured is None else 0.0,
    )


def _chunk_tokens(spec: VersionSpec) -> int:
    stated = {name.replace("-", "_"): value for name, value in spec.engine_options.items()}
    found = next((stated[name] for name in CHUNK_OPTIONS if name in stated), CHUNK_TOKENS)
    return found if isinstance(found, int) and found > 0 else CHUNK_TOKENS
