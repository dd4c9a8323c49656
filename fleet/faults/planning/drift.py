"""Decides which deployments guess worse than their version was calibrated to, and which cells count tokens differently
from their engines. Pure. Both compare what engines accepted or counted since one moment.

How much a draft should bring depends on how many tokens it has, which changes with the load; a calibration says it for
each number. Of several tasks the one that is guessed worst counts: nobody knows the mix.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

OF_SPECULATION = "speculation-drift"
SHARE_LEAST = 0.9
"""Of the calibration; issue 18 asks for an incident below it."""
SHARE_AGAIN = 0.95
COVERED_LEAST_S = 3500.0
"""An hour, less what lies between two looks."""
DRAFTS_LEAST = 1000
"""With half of 4 guesses right, the mean of so many drafts is off by 5 % in one of a hundred hours."""


@dataclass(frozen=True, slots=True)
class Guessing:
    """What the engine of one cell guessed in the last `covered_s`."""

    deployment: str
    version: str
    covered_s: float
    drafts: int
    guessed: int
    accepted: int
    chains: Mapping[str, tuple[float, ...]]
    """Of its version's calibration: task -> tokens of a step by how many are guessed, from none on."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Of a deployment: `accepted` tokens of a draft of `guessed`, and how many were `expected`."""

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
    """`opened`: with the sentence of the incident; `closed`: deployments with why theirs is over."""

    opened: tuple[tuple[Drift, str], ...] = ()
    closed: tuple[tuple[str, str], ...] = ()


def plan_speculation_drift(
    cells: Iterable[Guessing], known: Collection[str], open_about: Collection[str]
) -> SpeculationDriftPlan:
    """What to open and close. `known`: deployments that there are; `open_about`: those with an open incident. One that
    guessed too little to be judged keeps its incident."""
    judged = {each.deployment: each for each in _drifts(cells)}
    opened = tuple(
        (each, _sentence(each))
        for name, each in sorted(judged.items())
        if each.share < SHARE_LEAST and name not in open_about
    )
    closed = []
    for name in sorted(open_about):
        if name not in known:
            closed.append((name, "the deployment is no more"))
        elif name in judged and judged[name].share >= SHARE_AGAIN:
            closed.append((name, f"{judged[name].share:.0%} of what {judged[name].version} was calibrated to"))
    return SpeculationDriftPlan(opened, tuple(closed))


def _drifts(cells: Iterable[Guessing]) -> Iterable[Drift]:
    """Of each deployment, over its cells of one version that were watched for an hour; during a rollout of the version
    that guessed most."""
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
    """Tokens of a draft that a calibration expects to be right, by how many it has; between whole numbers of them along
    a straight line."""
    low = min(int(guessed), len(chain) - 1)
    high = min(low + 1, len(chain) - 1)
    return chain[low] + (chain[high] - chain[low]) * (guessed - low) - 1


def _sentence(each: Drift) -> str:
    return (
        f"{each.deployment} accepts {each.accepted:.2f} of {each.guessed:.1f} guessed tokens in the last hour, "
        f"{each.share:.0%} of the {each.expected:.2f} that {each.version} was calibrated to"
    )


# Decides which cells count tokens otherwise than their engines do, from what both counted since the same moment.
# A bill is made of what cell proxies count; their engines' own counters are the only other witness. What is in
# flight is in neither count (`engine_agent.protocol.messages.TokenCheck`), so any difference is one. Nothing is
# corrected here.

OF_TOKENS = "token-drift"
DRIFT_ALLOWED = 0.001
"""Of the engine's count; issue 16 sets it."""
TOKENS_ALLOWED = 200
"""A difference of less is none, however few tokens there were: a probe that was cut by a restart has some 40."""


@dataclass(frozen=True, slots=True)
class CheckedCell:
    """What both counted of one cell, `since` seconds since 1970: prompts and completions."""

    cell: str
    since: float
    engine: tuple[int, int]
    counted: tuple[int, int]

    @property
    def drift(self) -> int:
        """By how many tokens the counts differ, both ways added."""
        return sum(abs(ours - theirs) for ours, theirs in zip(self.counted, self.engine, strict=True))

    @property
    def has_drift(self) -> bool:
        return self.drift > max(TOKENS_ALLOWED, DRIFT_ALLOWED * sum(self.engine))


@dataclass(frozen=True, slots=True)
class DriftPlan:
    """`opened`: cells with the sentence of their incident; `closed`: cells with why theirs is over."""

    opened: tuple[tuple[CheckedCell, str], ...] = ()
    closed: tuple[tuple[str, str], ...] = ()


def plan_token_drift(
    checked: Iterable[CheckedCell], known_cells: Collection[str], open_about: Collection[str]
) -> DriftPlan:
    """What to open and close. `known_cells`: those that there are; `open_about`: those with an open incident. A cell
    that says nothing now keeps its incident."""
    by_cell = {each.cell: each for each in checked}
    opened = [
        (each, _token_sentence(each))
        for name, each in sorted(by_cell.items())
        if each.has_drift and name not in open_about
    ]
    closed = []
    for name in sorted(open_about):
        if name not in known_cells:
            closed.append((name, "the cell is no more"))
        elif name in by_cell and not by_cell[name].has_drift:
            closed.append((name, "cell and engine count the same again"))
    return DriftPlan(tuple(opened), tuple(closed))


def _token_sentence(each: CheckedCell) -> str:
    share = 100 * each.drift / max(1, sum(each.engine))
    return (
        f"{each.cell} counted {each.counted[0]} prompt and {each.counted[1]} completion tokens, its engine"
        f" {each.engine[0]} and {each.engine[1]}: {share:.2f} % apart"
    )
