"""The autoscaler on a deployment's page: where its cells are a range, what is wanted there and why, and the last
decisions with what became of them."""

from dataclasses import dataclass

from fleet.models import Deployment, DeploymentRegion, ScalingDecision, ScalingState, ScalingSwitch
from fleet.planning.autoscaling.policy import InvalidScaling, ScalingMode, ScalingPolicy
from fleet.planning.autoscaling.view import ScalingRule
from fleet.planning.hold import may_be_empty
from fleet.selectors.autoscaling import scaling_state, scaling_switch
from kernel.tones import Tone
from traffic.planning.routing import HeldDeployment
from traffic.selectors.routing import held_deployments

DECISIONS_SHOWN = 8
BOUND = frozenset({ScalingRule.MAX.value, ScalingRule.BUDGET.value, ScalingRule.UNKNOWN_LOAD.value})
"""Rules after which somebody may want to look."""


@dataclass(frozen=True, slots=True)
class ScaledPlaceRow:
    """A region with a range; `state` None: nobody has looked yet."""

    place: DeploymentRegion
    state: ScalingState | None

    @property
    def tone(self) -> Tone:
        if self.state is None or self.state.rule in BOUND:
            return Tone.WARN if self.state else Tone.IDLE
        return Tone.OK if self.state.wanted == self.place.cells else Tone.MOVING

    @property
    def percent(self) -> float | None:
        """How full the cells in force are, in per cent of what they were tested for."""
        load: dict[str, float] = self.state.load if self.state else {}
        if "in_flight" not in load or not load.get("per_cell") or not self.place.cells:
            return None
        return 100.0 * (load["in_flight"] + load["queued"]) / (self.place.cells * load["per_cell"])

    @property
    def held(self) -> int:
        """Requests that waited for its first cell at the last look."""
        return round((self.state.load if self.state else {}).get("held") or 0)


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """A decision, its regret in seconds of cells; None: nothing was seen since."""

    decision: ScalingDecision
    tone: Tone
    too_few_s: float | None
    too_many_s: float | None


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """What a page shows of one deployment. `problem`: why its stored policy cannot be read; then nothing is done."""

    deployment: str
    policy: ScalingPolicy
    switch: ScalingSwitch
    places: tuple[ScaledPlaceRow, ...]
    decisions: tuple[DecisionRow, ...]
    problem: str = ""
    hold: HeldDeployment | None = None
    """How requests wait for its first cell; None: they do not."""

    @property
    def may_be_empty(self) -> bool:
        return may_be_empty(self.policy, [row.place.range for row in self.places if row.place.range])

    @property
    def target_percent(self) -> float:
        return 100.0 * self.policy.target_utilisation

    @property
    def is_shadow(self) -> bool:
        return self.policy.mode is ScalingMode.SHADOW


def autoscaling_of(deployment: Deployment) -> Autoscaling:
    places = DeploymentRegion.objects.filter(deployment=deployment, cells_max__isnull=False)
    rows = places.select_related("scaling_state").order_by("region_id")
    decisions = ScalingDecision.objects.filter(deployment=deployment)[:DECISIONS_SHOWN]
    policy, problem = ScalingPolicy(), ""
    try:
        policy = deployment.scaling_policy()
    except InvalidScaling as wrong:
        problem = str(wrong)
    return Autoscaling(
        deployment.name,
        policy,
        scaling_switch(),
        tuple(ScaledPlaceRow(place, scaling_state(place)) for place in rows),
        tuple(_decision(row) for row in decisions),
        problem,
        held_deployments().get(deployment.name),
    )


def _decision(row: ScalingDecision) -> DecisionRow:
    tone = Tone.IDLE if not row.acted else Tone.WARN if row.rule in BOUND else Tone.MOVING
    if not row.observed_s:
        return DecisionRow(row, tone, None, None)
    return DecisionRow(row, tone, row.too_few_cell_s, row.too_many_cell_s)
