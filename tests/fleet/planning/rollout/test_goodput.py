"""A version that carries less than the one before does not go on by itself."""

import pytest

from fleet.planning.policy import GatePolicy, GoodputMissing
from fleet.planning.rollout.evidence import goodput_objection
from fleet.planning.snapshot import Finding
from models_registry.planning.benchmark import ComparedGoodput

ASKED = GatePolicy(goodput_ratio=0.95)


def pair(before: float, after: float, label: str = "1000+150 within ttft=500,itl=50") -> ComparedGoodput:
    return ComparedGoodput(label, before, after)


@pytest.mark.parametrize("compared", [(), (pair(4, 1),)])
def test_without_a_ratio_nobody_asks(compared: tuple[ComparedGoodput, ...]) -> None:
    assert goodput_objection(compared, GatePolicy()) is None


@pytest.mark.parametrize(("after", "passes"), [(4.0, True), (3.8, True), (3.79, False), (0.0, False), (9.0, True)])
def test_as_much_as_the_policy_requires_is_enough(after: float, passes: bool) -> None:
    assert (goodput_objection((pair(4.0, after),), ASKED) is None) is passes


def test_the_worst_of_several_conditions_decides_and_is_named() -> None:
    found = goodput_objection((pair(4, 5), pair(2, 1, "3000+50 within ttft=900,itl=80"), pair(9, 8)), ASKED)
    assert found is not None
    assert found.finding is Finding.INCONCLUSIVE
    assert found.reason == (
        "it carries 1 requests/s a cell, 0.50 of the old version's 2, at 3000+50 within ttft=900,itl=80; "
        "0.95 is required"
    )


@pytest.mark.parametrize("compared", [(), (pair(0, 3),)])
def test_nothing_measured_is_as_the_policy_says(compared: tuple[ComparedGoodput, ...]) -> None:
    found = goodput_objection(compared, ASKED)
    assert found is not None
    assert "switchyard bench run" in found.reason
    assert goodput_objection(compared, GatePolicy(goodput_ratio=0.95, goodput_missing=GoodputMissing.GO_ON)) is None
