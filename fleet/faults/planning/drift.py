"""Decides when an incident about drift opens and closes: deployments whose speculation is accepted less often than
calibrated, and cells whose token counts differ from their engine's. Corrects nothing.

The acceptance of a draft depends on its length, which changes with the load, so a calibration has one value per length.
The mix of tasks is unknown, so the task with the worst acceptance counts."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

SPECULATION_DRIFT = "speculation-drift"
SHARE_LEAST = 0.9
"""Share of the calibrated acceptance below which an incident opens."""
SHARE_AGAIN = 0.95
COVERED_LEAST_S = 3500.0
"""One hour minus the time between two checks."""
DRAFTS_LEAST = 1000
"""With half of 4 guesses right, the mean of 1000 drafts is off by 5 % once in a hundred hours."""


@dataclass(frozen=True, slots=True)
class Guessing:
    """Speculation counters of one cell's engine over the last `covered_s`."""

    deployment: str
    version: str
    covered_s: float
    drafts: int
    guessed: int
    accepted: int
    chains: Mapping[str, tuple[float, ...]]
    """From the version's calibration: task -> tokens per step by number of guessed tokens, starting at none."""


@dataclass(frozen=True, slots=True)
class Drift:
    """A deployment's `accepted` and `expected` tokens per draft of `guessed` tokens."""

    deployment: str
    version: str
    drafts: int
    guessed: float
    accepted: float
    expected: float

    @property
    def share(self) -> float:
        return self.accepted / self.expected


@dataclass(frozen=True, slots=True)
class SpeculationDriftPlan:
    """`opened`: drifts with the incident's summary; `closed`: deployments with the reason."""

    opened: tuple[tuple[Drift, str], ...] = ()
    closed: tuple[tuple[str, str], ...] = ()


def plan_speculation_drift(
    cells: Iterable[Guessing], known: Collection[str], open_about: Collection[str]
) -> SpeculationDriftPlan:
    """`known`: existing deployments; `open_about`: those with an open incident. A deployment with too few drafts keeps
    its incident."""
    judged = {each.deployment: each for each in _drifts(cells)}
    opened = tuple(
        (each, _speculation_sentence(each))
        for name, each in sorted(judged.items())
        if each.share < SHARE_LEAST and name not in open_about
    )
    closed = []
    for name in sorted(open_about):
        if name not in known:
            closed.append((name, "the deployment was deleted"))
        elif name in judged and judged[name].share >= SHARE_AGAIN:
            closed.append((name, f"{judged[name].share:.0%} of what {judged[name].version} was calibrated to"))
    return SpeculationDriftPlan(opened, tuple(closed))


def _drifts(cells: Iterable[Guessing]) -> Iterable[Drift]:
    """One per deployment, over its cells of one version with an hour of data. During a rollout, the version with the
    most drafts."""
    together: dict[tuple[str, str], list[Guessing]] = {}
    for each in cells:
        if each.covered_s >= COVERED_LEAST_S and each.chains:
            together.setdefault((each.deployment, each.version), []).append(each)
    largest: dict[str, Drift] = {}
    for (deployment, version), found in sorted(together.items()):
        drafts = sum(each.drafts for each in found)
        if drafts < DRAFTS_LEAST:
            continue
        guessed = sum(each.guessed for each in found) / drafts
        expected = min(accepted_expected(chain, guessed) for chain in found[0].chains.values())
        if expected <= 0 or (deployment in largest and largest[deployment].drafts >= drafts):
            continue
        accepted = sum(each.accepted for each in found) / drafts
        largest[deployment] = Drift(deployment, version, drafts, guessed, accepted, expected)
    return largest.values()


def accepted_expected(chain: Sequence[float], guessed: float) -> float:
    """Accepted tokens that a calibration expects of a draft of `guessed` tokens, interpolated linearly."""
    low = min(int(guessed), len(chain) - 1)
    high = min(low + 1, len(chain) - 1)
    return chain[low] + (chain[high] - chain[low]) * (guessed - low) - 1


def _speculation_sentence(each: Drift) -> str:
    return (
        f"{each.deployment} accepts {each.accepted:.2f} of {each.guessed:.1f} guessed tokens in the last hour, "
        f"{each.share:.0%} of the {each.expected:.2f} that {each.version} was calibrated to"
    )


# Bills are made from the counts of cell proxies; the engines' counters are the only check. Requests in flight are in
# neither count (`engine_agent.protocol.load_messages.TokenCheck`).

TOKENS_DRIFT = "token-drift"
DRIFT_ALLOWED = 0.001
"""Share of the engine's count."""
TOKENS_ALLOWED = 200
"""Smaller differences are ignored. A probe that was cut off by a restart has about 40 tokens."""


@dataclass(frozen=True, slots=True)
class CheckedCell:
    """Prompt and completion tokens of one cell, counted by its engine and its proxy `since` (seconds since 1970)."""

    cell: str
    since: float
    engine: tuple[int, int]
    counted: tuple[int, int]

    @property
    def drift(self) -> int:
        """Sum of the absolute differences of prompts and completions."""
        return sum(abs(ours - theirs) for ours, theirs in zip(self.counted, self.engine, strict=True))

    @property
    def has_drift(self) -> bool:
        return self.drift > max(TOKENS_ALLOWED, DRIFT_ALLOWED * sum(self.engine))


@dataclass(frozen=True, slots=True)
class DriftPlan:
    """`opened`: cells with the incident's summary; `closed`: cells with the reason."""

    opened: tuple[tuple[CheckedCell, str], ...] = ()
    closed: tuple[tuple[str, str], ...] = ()


def plan_token_drift(
    checked: Iterable[CheckedCell], known_cells: Collection[str], open_about: Collection[str]
) -> DriftPlan:
    """`known_cells`: existing cells; `open_about`: those with an open incident. A cell without a current report keeps
    its incident."""
    by_cell = {each.cell: each for each in checked}
    opened = [
        (each, _token_sentence(each))
        for name, each in sorted(by_cell.items())
        if each.has_drift and name not in open_about
    ]
    closed = []
    for name in sorted(open_about):
        if name not in known_cells:
            closed.append((name, "the cell was stopped"))
        elif name in by_cell and not by_cell[name].has_drift:
            closed.append((name, "cell and engine agree again"))
    return DriftPlan(tuple(opened), tuple(closed))


def _token_sentence(each: CheckedCell) -> str:
    share = 100 * each.drift / max(1, sum(each.engine))
    return (
        f"{each.cell} counted {each.counted[0]} prompt and {each.counted[1]} completion tokens, its engine"
        f" {each.engine[0]} and {each.engine[1]}: {share:.2f} % apart"
    )
