"""The ladder of repairs: which rung follows from which evidence, what is skipped and why, and what ends an attempt."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.protocol.signatures import CLOUD_ALARM_GRAVE, HARD_SIGNATURES, FaultScope, FaultSignature
from fleet.faults.planning.ladder import (
    DETAILED,
    RUNGS,
    Ladder,
    is_grave,
    plan_ladder,
    rungs_of,
    verdict_of,
    why_impossible,
)
from fleet.faults.planning.planner import plan_faults
from fleet.faults.planning.repairs import is_under_repair, plan_repairs
from fleet.faults.planning.views import Attempt, IncidentKind, Rule, Rung, SignalView
from fleet.machines.planner import ProviderLimits
from fleet.reconcile.planning.decisions import CheckRepair, CordonNode, EndRepair, OpenIncident, ReplaceNode, TryRepair
from fleet.reconcile.planning.planner import plan_reconcile
from fleet.reconcile.planning.snapshot import FleetView, NodeView
from fleet.reconcile.planning.states import NodeState
from tests.fleet.faults.faulty import HARD, incident, replacement, signal, with_faults
from tests.fleet.fleets import NOW, SETTINGS, ago, fleet, member, node

FAULTS = SETTINGS.faults
RESET, REBOOT, REPLACE = Rung.RESET, Rung.REBOOT, Rung.REPLACE
XID, LOST = FaultSignature.NVIDIA_XID_FATAL, FaultSignature.NVIDIA_GPU_LOST
SHARED = "m-0000000a"


def xid(code: int = 48, **changes: Any) -> SignalView:
    return signal("n", XID, detail=str(code), device="GPU-1", **changes)


def attempt(rung: Rung = RESET, **changes: Any) -> Attempt:
    return replace(Attempt(1, "n", rung, "it broke", ago(60), request="r1"), **changes)


def failed(rung: Rung, **changes: Any) -> Attempt:
    return attempt(rung, at=ago(3), ended_at=ago(1), result="matmul: 7 of 9 sums are wrong", **changes)


def plan(*signals: SignalView, impossible: dict[Rung, str] | None = None, attempts: Sequence[Attempt] = ()) -> Ladder:
    possible = {Rung.RESTART: "a restart of the engine does not cure broken hardware", **(impossible or {})}
    return plan_ladder(signals, possible, attempts, FAULTS, NOW)


def states(ladder: Ladder) -> list[str]:
    return [step.state for step in ladder.steps]


def test_every_signature_has_rungs_that_end_with_the_replacement() -> None:
    assert set(RUNGS) == {*FaultSignature, CLOUD_ALARM_GRAVE}
    for rungs in (*RUNGS.values(), *DETAILED.values()):
        assert rungs[-1] is REPLACE
        assert list(rungs) == [rung for rung in Rung if rung in rungs], "lowest first"


@pytest.mark.parametrize(
    ("signature", "detail", "first"),
    [
        ("nvidia_xid_fatal", "48", RESET),
        ("nvidia_xid_fatal", "119", RESET),
        ("nvidia_xid_fatal", "79", REBOOT),
        ("nvidia_gpu_lost", "15", REBOOT),
        ("nvidia_gpu_lost", "16", RESET),
        ("nvidia_recovery_needed", "1", RESET),
        ("nvidia_recovery_needed", "2", REBOOT),
        ("nvidia_row_remap_failed", "", REPLACE),
        ("nvidia_ecc_uncorrectable", "", RESET),
        ("accelerator_missing", "", REBOOT),
        ("nvidia_driver_silent", "", REBOOT),
        ("neuron_sram_uncorrectable", "", REPLACE),
        ("neuron_hbm_uncorrectable", "", REPLACE),
        ("neuron_hbm_repairable", "", RESET),
        ("neuron_compute_hang", "", REPLACE),
        ("deep_check_failed", "matmul", RESET),
        ("deep_check_failed", "memory", REPLACE),
        ("nvidia_xid", "31", Rung.RESTART),
    ],
)
def test_the_evidence_decides_the_first_rung(signature: str, detail: str, first: Rung) -> None:
    assert rungs_of(signal("n", signature, detail=detail))[0] is first


def test_a_ladder_names_each_rung_with_its_reason() -> None:
    ladder = plan(xid())
    assert (ladder.next, ladder.devices, ladder.reason) == (RESET, ("GPU-1",), f"{XID}: it broke")
    assert [step.as_evidence() for step in ladder.steps] == [
        {"rung": "restart_engine", "state": "skipped", "reason": f"it does not cure {XID} 48"},
        {"rung": "reset_device", "state": "next", "reason": "it broke"},
        {"rung": "reboot_machine", "state": "later", "reason": "if the reset of its device does not help"},
        {"rung": "replace_machine", "state": "later", "reason": "if the reset of its device does not help"},
    ]


def test_the_worst_of_several_faults_decides() -> None:
    assert plan(xid(), xid(79)).next is REBOOT
    assert plan(xid(), signal("n", FaultSignature.NVIDIA_ROW_REMAP_FAILED)).next is REPLACE


def test_soft_faults_do_not_count() -> None:
    assert plan(xid(), signal("n", FaultSignature.NVIDIA_XID, detail="31")).next is RESET


def test_a_rung_that_failed_is_followed_by_the_next_one() -> None:
    ladder = plan(xid(), attempts=[failed(RESET)])
    assert (ladder.next, states(ladder)) == (REBOOT, ["skipped", "failed", "next", "later"])
    assert ladder.steps[1].reason == "matmul: 7 of 9 sums are wrong"
    assert plan(xid(), attempts=[failed(RESET), failed(REBOOT)]).next is REPLACE


def test_while_an_attempt_runs_nothing_else_is_tried() -> None:
    ladder = plan(xid(), attempts=[attempt(at=ago(1))])
    assert (ladder.next, ladder.running, states(ladder)[1:]) == (
        None,
        attempt(at=ago(1)),
        ["running", "later", "later"],
    )


def test_a_fault_that_came_back_twice_is_not_reset_a_third_time() -> None:
    cured = [attempt(id=n, at=ago(86400 * n), ended_at=ago(86400 * n - 60), cured=True) for n in (2, 1)]
    ladder = plan(xid(), attempts=cured)
    assert ladder.next is REBOOT
    assert ladder.steps[1].reason == "it was tried 2 times in 7 days, and the fault came back"
    assert plan(xid(), attempts=cured[1:]).next is RESET
    assert plan(xid(), attempts=[replace(one, at=ago(8 * 86400)) for one in cured]).next is RESET


def test_a_soft_fault_that_restarts_do_not_cure_takes_its_node_out_of_use_for_a_reset() -> None:
    contained = signal("n", FaultSignature.NVIDIA_ECC_CONTAINED, count=4, first_at=ago(3600), device="GPU-1")
    ladder = plan(contained)
    assert (ladder.next, states(ladder)) == (RESET, ["failed", "next", "later", "later"])
    assert ladder.steps[0].reason == "nvidia_ecc_contained came back 3 times"
    view = with_faults(fleet(node("n")), contained)
    decisions: tuple[Any, ...] = plan_faults(view, SETTINGS, NOW)
    opened, *acts = decisions
    assert (opened.kind, [type(each) for each in acts]) == (IncidentKind.HARDWARE, [CordonNode, ReplaceNode])
    for rare in (
        replace(contained, count=3),
        replace(contained, first_at=ago(8 * 86400)),
        replace(contained, signature=FaultSignature.NVIDIA_XID, count=99),
    ):
        assert not is_grave(rare, FAULTS)
        kinds = [type(each) for each in plan_faults(with_faults(fleet(node("n")), rare), SETTINGS, NOW)]
        assert kinds == [OpenIncident]


PLACE: dict[str, Any] = {
    "device_count": 8,
    "devices": ("GPU-1",),
    "is_connected": True,
    "scope": FaultScope.DEVICE,
    "no_reboot": "",
    "others": (),
}


@pytest.mark.parametrize(
    ("place", "rung", "says"),
    [
        ({"device_count": 0}, RESET, "the node has no accelerator"),
        ({"devices": ("MIG-1",)}, RESET, "its device is a MIG instance, and a reset would end the other instances"),
        ({"scope": FaultScope.MACHINE}, RESET, "the fault is not of a device"),
        ({"is_connected": False}, RESET, "its agent is not connected"),
        (
            {"devices": ("neuron 3",), "others": ("o",)},
            RESET,
            "Neuron devices are reset together by reloading their driver, and o of its machine is in use",
        ),
        ({"no_reboot": "its provider has no power control"}, REBOOT, "its provider has no power control"),
        ({"others": ("o", "p")}, REBOOT, "o, p of its machine are in use"),
    ],
)
def test_a_rung_that_is_not_possible_there_is_skipped_with_the_reason(
    place: dict[str, Any], rung: Rung, says: str
) -> None:
    impossible = why_impossible(**{**PLACE, **place})
    assert impossible[rung].startswith(says)
    ladder = plan(xid(), impossible=impossible)
    assert ladder.next is not rung
    assert next(step for step in ladder.steps if step.rung is rung).reason == impossible[rung]


def test_everything_is_possible_on_a_machine_of_its_own() -> None:
    assert set(why_impossible(**PLACE)) == {Rung.RESTART}


@given(
    st.lists(st.sampled_from(sorted(HARD_SIGNATURES)), min_size=1, max_size=3),
    st.sets(st.sampled_from([RESET, REBOOT])),
)
def test_every_ladder_ends_with_the_replacement(signatures: list[str], impossible: set[Rung]) -> None:
    signals = [signal("n", name) for name in signatures]
    attempts: list[Attempt] = []
    ladder = plan(*signals, impossible=dict.fromkeys(impossible, "no"))
    while ladder.next is not REPLACE:
        assert ladder.next is not None
        assert ladder.next not in impossible
        assert all(ladder.next in rungs_of(one) for one in signals)
        attempts.append(failed(ladder.next, id=len(attempts)))
        assert len(attempts) <= 2
        ladder = plan(*signals, impossible=dict.fromkeys(impossible, "no"), attempts=attempts)


PASSED = (("reset", True, "reset nvidia 0"), ("matmul", True, "exact"), ("disk", None, "it is full"))


@pytest.mark.parametrize(
    ("checks", "verdict"),
    [
        (PASSED, (True, "1 deep checks passed")),
        ((*PASSED, ("memory", False, "byte 3")), (False, "memory: byte 3")),
        ((("reset", False, "in use by another client"), *PASSED[1:]), (False, "reset: in use by another client")),
        (PASSED[1:], (False, "its agent did not reset the device")),
        ((PASSED[0], PASSED[2]), (False, "no deep check could run")),
        (None, None),
    ],
)
def test_deep_checks_decide_whether_a_reset_helped(checks: Any, verdict: Any) -> None:
    assert verdict_of(attempt(checks=checks), (), FAULTS, NOW) == verdict


def test_an_attempt_without_a_result_ends_and_a_fault_that_is_seen_again_is_not_cured() -> None:
    late = attempt(at=ago(FAULTS.reset_limit_s + 1))
    assert verdict_of(late, (), FAULTS, NOW) == (False, "no result within 10 min")
    assert verdict_of(replace(late, rung=REBOOT), (), FAULTS, NOW) is None
    rebooted = attempt(REBOOT, checks=PASSED[1:])
    assert verdict_of(rebooted, (), FAULTS, NOW) == (True, "1 deep checks passed")
    assert verdict_of(rebooted, ["nvidia 0 is lost"], FAULTS, NOW) == (False, "seen again: nvidia 0 is lost")


# --- in a fleet -------------------------------------------------------------------------------------------------------


def faulty(*signals: SignalView, attempts: Sequence[Attempt] = (), power: bool = True, **changes: Any) -> FleetView:
    """A node `n` out of use, with eight devices."""
    broken = node("n", **{"state": NodeState.FAULTY, "cordoned": True, "devices": 8, **changes})
    view = with_faults(fleet(broken, node("s"), wanted=0, warm=1), *signals, attempts={"n": tuple(attempts)})
    regions = {"east": replace(view.regions["east"], limits=ProviderLimits(has_power_control=power))}
    return replace(view, regions=regions)


def repairs(view: FleetView) -> list[Any]:
    return list(plan_repairs(view, FAULTS, NOW))


def is_retired(view: FleetView) -> bool:
    kept = is_under_repair(view, view.nodes["n"], FAULTS, NOW)
    retired = any(getattr(each, "node", "") == "n" for each in plan_reconcile(view, SETTINGS, NOW))
    assert kept is not retired
    return retired


def test_a_node_out_of_use_climbs_its_ladder_before_it_is_retired() -> None:
    view = faulty(xid())
    assert repairs(view) == [TryRepair("n", RESET, f"{XID}: it broke", ("GPU-1",))]
    assert not is_retired(view)
    assert repairs(faulty(xid(), attempts=[failed(RESET)])) == [TryRepair("n", REBOOT, f"{XID}: it broke", ("GPU-1",))]
    both = faulty(xid(), attempts=[failed(RESET), failed(REBOOT)])
    assert repairs(both) == []
    assert is_retired(both)


@pytest.mark.parametrize("view", [faulty(signal("n")), faulty(), faulty(xid(79), power=False)])
def test_a_node_that_nothing_cures_is_retired(view: FleetView) -> None:
    assert repairs(view) == []
    assert is_retired(view)


def test_a_node_that_an_operator_or_its_provider_takes_away_is_not_repaired() -> None:
    for rule in (Rule.OPERATOR, Rule.NOTICE):
        view = faulty(xid())
        view = replace(view, faults=replace(view.faults, replacements=(replacement("n", rule=rule),)))
        assert repairs(view) == []
        assert is_retired(view)


def test_a_node_in_use_and_one_that_waits_for_an_operator_are_left_alone() -> None:
    assert repairs(faulty(xid(), state=NodeState.READY)) == []
    held = incident(IncidentKind.REPEATED_REPAIRS, "n")
    view = faulty(xid())
    assert repairs(replace(view, faults=replace(view.faults, incidents=(held,)))) == []


def test_a_reset_ends_with_its_checks_and_keeps_the_ladder() -> None:
    (ended,) = repairs(faulty(xid(first_at=ago(90)), attempts=[attempt(checks=PASSED)]))
    assert (ended.repair, ended.node, ended.rung, ended.cured) == (1, "n", RESET, True)
    assert ended.ladder[1] == {"rung": "reset_device", "state": "running", "reason": "it broke"}
    running = faulty(xid(), attempts=[attempt()])
    assert (repairs(running), is_retired(running)) == ([], False)


def test_a_machine_is_checked_once_it_is_back_from_its_reboot() -> None:
    def rebooting(**report: Any) -> FleetView:
        order = attempt(REBOOT, request="", at=ago(60))
        return faulty(xid(79), attempts=[order], report=report)

    assert repairs(rebooting(connection_changed_at=ago(600))) == [], "it has not gone down yet"
    assert repairs(rebooting(connected=False, connection_changed_at=ago(30))) == []
    assert repairs(rebooting(connection_changed_at=ago(5))) == [CheckRepair(1, "n")]
    back = attempt(REBOOT, checks=PASSED[1:])
    (ended,) = repairs(faulty(xid(79, last_at=ago(70)), attempts=[back], report={"connection_changed_at": ago(30)}))
    assert (ended.cured, ended.result) == (True, "1 deep checks passed")
    (ended,) = repairs(faulty(xid(79, last_at=ago(20)), attempts=[back], report={"connection_changed_at": ago(30)}))
    assert (ended.cured, ended.result) == (False, "seen again: it broke")


def test_a_reboot_waits_for_the_other_nodes_of_its_machine() -> None:
    others: list[NodeView] = [member("o", of="c1", topology=(SHARED,)), node("p", topology=(SHARED,))]
    broken = node("n", state=NodeState.FAULTY, topology=(SHARED,), devices=1)
    view = with_faults(fleet(broken, *others), xid(79))
    power = {"east": replace(view.regions["east"], limits=ProviderLimits(has_power_control=True))}
    assert repairs(replace(view, regions=power)) == []
    assert repairs(replace(with_faults(fleet(broken), xid(79)), regions=power)) == [
        TryRepair("n", REBOOT, f"{XID}: it broke", ("GPU-1",))
    ]


def test_repairs_of_one_machine_do_not_disturb_each_other() -> None:
    nodes = [node(name, state=NodeState.FAULTY, devices=1, topology=(SHARED,)) for name in "no"]

    def tried(first: str, second: str, *attempts: Attempt) -> list[tuple[str, Rung]]:
        signals = (xid(int(first)), replace(xid(int(second)), node="o", device="GPU-2"))
        view = with_faults(fleet(*nodes), *signals, attempts={"n": attempts})
        view = replace(
            view, regions={"east": replace(view.regions["east"], limits=ProviderLimits(has_power_control=True))}
        )
        assert is_under_repair(view, view.nodes["o"], FAULTS, NOW)
        return [(one.node, one.rung) for one in repairs(view) if isinstance(one, TryRepair)]

    assert tried("48", "48") == [("n", RESET), ("o", RESET)], "each of its device"
    assert tried("79", "79") == [("n", REBOOT)]
    assert tried("48", "79") == [("n", RESET)]
    assert tried("79", "48", attempt(REBOOT, request="")) == []
    assert tried("79", "79", attempt(REBOOT)) == [], "its checks run"
    left = attempt(REBOOT, at=ago(FAULTS.reboot_limit_s + 1))
    assert tried("79", "79", left) == [("o", REBOOT)]


def test_the_incident_shows_the_rungs() -> None:
    (opened, *_) = [each for each in plan_faults(faulty(xid()), SETTINGS, NOW) if isinstance(each, OpenIncident)]
    assert [step["state"] for step in opened.evidence["ladder"]] == ["skipped", "next", "later", "later"]
    view = with_faults(fleet(node("n")), signal("n", HARD))
    (opened, *_) = [each for each in plan_faults(view, SETTINGS, NOW) if isinstance(each, OpenIncident)]
    assert opened.evidence["ladder"][1]["reason"] == f"it does not cure {HARD}"
    assert EndRepair not in {type(each) for each in plan_faults(view, SETTINGS, NOW)}
