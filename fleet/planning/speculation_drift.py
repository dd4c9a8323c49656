"""Decides which deployments guess worse than their version was calibrated to, from what their engines accepted in the
last hour. Pure.

How much a draft should bring depends on how many tokens it has, which changes with the load; a calibration says it for
each number. Of several tasks the one that is guessed worst counts: nobody knows the mix.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

KIND = "speculation-drift"
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
