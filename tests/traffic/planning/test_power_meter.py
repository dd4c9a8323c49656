"""When a machine's power meter is said to lie, and when it is believed again: tables of exact decisions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traffic.planning.power_meter import QUIET_MS, REFUSED_MOST, MeterLook, MeterPlan, Suspicion, plan_power_meters

GOOD, BAD, SILENT, NONE = MeterLook(0, True), MeterLook(1, False), MeterLook(0, False), MeterLook(0, False, False)
STEP_MS = 15_000


def after(*looks: MeterLook | None, step_ms: int = STEP_MS) -> tuple[list[str], MeterPlan]:
    """What happens look by look: `+` opened, `-` closed, `.` neither; and the last plan."""
    plan, open_about, happened = MeterPlan({}), frozenset[str](), []
    for number, look in enumerate(looks):
        seen = {} if look is None else {"n": look}
        plan = plan_power_meters(seen, plan.suspicions, open_about, number * step_ms)
        opened, closed = {node for node, _ in plan.opened}, {node for node, _ in plan.closed}
        open_about = (open_about | opened) - closed
        happened.append("+" if opened else "-" if closed else ".")
    return happened, plan


@pytest.mark.parametrize(
    ("looks", "happened"),
    [
        ((GOOD, BAD, GOOD, BAD, GOOD), "....."),
        ((BAD, BAD, BAD, BAD), "..+."),
        ((MeterLook(REFUSED_MOST + 1, True),), "+"),
        ((BAD, BAD, BAD, None), "..+-"),
        ((BAD, BAD, BAD, NONE), "..+-"),
        ((BAD, BAD, BAD, GOOD), "..+."),
    ],
    ids=["two restarts", "one after another", "many at once", "gone", "without a meter", "believed for a moment"],
)
def test_what_is_opened_and_closed(looks: tuple[MeterLook | None, ...], happened: str) -> None:
    assert "".join(after(*looks)[0]) == happened


def test_it_ends_after_ten_minutes_of_readings_that_are_believed() -> None:
    quiet = QUIET_MS // STEP_MS
    happened, plan = after(BAD, BAD, BAD, *[GOOD] * quiet)
    assert (happened[2], happened[-2], happened[-1]) == ("+", ".", "-")
    assert plan.closed == (("n", "its readings are believed again"),)
    assert not plan.suspicions


def test_a_node_that_says_nothing_keeps_its_incident() -> None:
    happened, plan = after(BAD, BAD, BAD, *[SILENT] * (3 * QUIET_MS // STEP_MS))
    assert happened.count("-") == 0
    assert plan.suspicions["n"].refused == 3


def test_what_was_wrong_long_ago_is_not_added_to() -> None:
    before = {"n": Suspicion(2, 0, 0)}
    plan = plan_power_meters({"n": BAD}, before, frozenset(), QUIET_MS + 1)
    assert plan.suspicions == {"n": Suspicion(1, QUIET_MS + 1, QUIET_MS + 1)}
    assert not plan.opened


looks = st.sampled_from([GOOD, BAD, SILENT, NONE, None])


@given(st.lists(looks, max_size=60), st.integers(1_000, 400_000))
def test_an_incident_is_opened_before_it_is_closed_and_a_meter_that_is_never_refused_has_none(
    seen: list[MeterLook | None], step_ms: int
) -> None:
    happened = [one for one in after(*seen, step_ms=step_ms)[0] if one != "."]
    assert happened == ["+", "-"] * (len(happened) // 2) + ["+"] * (len(happened) % 2)
    assert BAD in seen or not happened
