"""Which releases of the agent are kept: what something names, what is new, and the way back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.planning.agent_releases import RetentionSettings, RolloutReleases, plan_removal

TWO = RetentionSettings(newest=2, rollouts=1)
KNOWN = ["e", "d", "c", "b", "a"]


def ended(number: int, source: str, target: str) -> RolloutReleases:
    return RolloutReleases(number, source, target, is_active=False)


@pytest.mark.parametrize(
    ("named", "rollouts", "releases", "forgotten"),
    [
        ((), [], ("c", "b", "a"), ()),
        (("b", ""), [], ("c", "a"), ()),
        ((), [ended(1, "a", "b")], ("c",), ()),
        ((), [ended(1, "a", "b"), ended(2, "b", "c")], ("a",), (1,)),
        ((), [RolloutReleases(1, "a", "b", is_active=True), ended(2, "b", "c"), ended(3, "c", "d")], (), (2,)),
    ],
)
def test_what_nothing_names_goes(
    named: tuple[str, ...], rollouts: list[RolloutReleases], releases: tuple[str, ...], forgotten: tuple[int, ...]
) -> None:
    removal = plan_removal(KNOWN, named, rollouts, TWO)
    assert (removal.releases, removal.rollouts) == (releases, forgotten)


names = st.sampled_from("abcdefgh")
rollouts = st.builds(RolloutReleases, st.integers(1, 20), names, names, st.booleans())


@given(st.lists(names, unique=True), st.sets(names), st.lists(rollouts, unique_by=lambda each: each.id))
def test_nothing_that_is_named_goes(known: list[str], named: set[str], told: list[RolloutReleases]) -> None:
    removal = plan_removal(known, named, told, TWO)
    stay = [each for each in told if each.id not in removal.rollouts]
    assert {each for each in told if each.is_active} <= set(stay)
    assert len([each for each in stay if not each.is_active]) <= TWO.rollouts
    gone = set(removal.releases)
    assert not gone & (named | {name for each in stay for name in (each.source, each.target)} | set(known[:2]))
    assert gone | removal.kept >= set(known)
    assert not gone & removal.kept
