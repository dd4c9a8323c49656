"""Recorded rounds decide the same when they are decoded and decided again; other settings decide otherwise, and what
cannot be decoded or set is refused."""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import msgspec
import pytest

from controlplane.explained import LOOPS
from fleet.faults.planning.liveness import plan_liveness
from fleet.faults.planning.views import FaultsView, SignalView, StepWindow
from fleet.reconcile.planning.decisions import MoveNode
from fleet.reconcile.planning.planner import PLANNERS, Planner
from fleet.reconcile.planning.settings import FleetSettings
from fleet.reconcile.planning.snapshot import FleetView, ProviderStatus
from fleet.reconcile.planning.states import NodeState
from fleet.recorder.planning.changes import names_of_settings, settings_changed
from fleet.recorder.planning.encoding import CannotDecode, decode_rounds, encode_round, schema_of
from fleet.recorder.planning.explanations import RECONCILER
from fleet.recorder.planning.loops import Decided, InvalidSetting, RecordedLoop, Round
from fleet.recorder.planning.replay import changes_by_loop, replay
from simulator.scenario import run
from simulator.scenarios import scenario_named, scenario_names
from tests.fleet.fleets import NOW, SETTINGS, ago, cell, fleet, member, node

REPEATING = {name for name in scenario_names() if scenario_named(name).skip_repeats}
"""Their reports are of a type that only the simulator has."""
SMALL = tuple(name for name in scenario_names() if name not in {"region_2500_rollout", "day_10000_nodes"} | REPEATING)


def chained(rounds: list[Round], length: int = 20, loop: RecordedLoop = RECONCILER) -> Iterator[Round]:
    """The rounds after a way through bytes, in chains of this length."""
    for first in range(0, len(rounds), length):
        chain = rounds[first : first + length]
        before = [None, *(one.view for one in chain)]
        coded = [encode_round(one, view) for one, view in zip(chain, before, strict=False)]
        yield from decode_rounds(loop, coded, schema_of(loop))


def recorded(monkeypatch: pytest.MonkeyPatch, name: str, seed: int) -> list[Round]:
    """The rounds of a simulated run that decided something."""
    rounds: list[Round] = []

    def recording(planner: Planner) -> Callable[..., tuple[Any, ...]]:
        def plan(view: FleetView, settings: Any, now: Any) -> tuple[Any, ...]:
            decisions = planner(view, settings, now)
            if decisions:
                decided = Decided(planner.__name__, decisions, (True,) * len(decisions))
                rounds.append(Round(view, settings, now, (decided,)))
            return decisions

        return plan

    monkeypatch.setattr("simulator.reconciler.PLANNERS", tuple(map(recording, PLANNERS)))
    run(scenario_named(name), seed)
    return rounds


def assert_decide_the_same(rounds: list[Round]) -> None:
    decoded = list(chained(rounds))
    assert len(decoded) == len(rounds)
    for then, now in zip(rounds, decoded, strict=True):
        assert now.view == then.view
        assert list(now.view.nodes) == list(then.view.nodes), "planners see nodes in the same order"
        assert list(now.view.cells) == list(then.view.cells)
        assert replay(RECONCILER, now).is_same
        explain = RECONCILER.explain(now)
        for decision in now.decided[0].decisions:
            reason = explain(decision, now.decided[0].planner)
            assert (reason.decision, bool(reason.rule)) == (type(decision).__name__, True)


@pytest.mark.slow
def test_rounds_of_a_simulated_fleet_decide_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = recorded(monkeypatch, "bad_version_never_starts", 1)
    assert len(rounds) > 5
    assert_decide_the_same(rounds[:60])


@pytest.mark.long
def test_a_thousand_rounds_of_all_scenarios_decide_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = (recorded(monkeypatch, name, seed) for seed in range(20) for name in SMALL)
    rounds = list(islice((one for found in runs for one in islice(found, 60)), 1000))
    assert len(rounds) == 1000
    assert_decide_the_same(rounds)


def silent_fleet() -> FleetView:
    """A node that fell silent 40 s ago, and is gone."""
    gone = member("b", report={"last_seen_at": ago(40), "connected": False}, provider=ProviderStatus.GONE)
    return fleet(member("a"), gone, cell("c1", "a", "b"))


def round_of(view: FleetView) -> Round:
    decisions = plan_liveness(view, SETTINGS, NOW)
    return Round(view, SETTINGS, NOW, (Decided("plan_liveness", decisions, (True,) * len(decisions)),))


def test_another_setting_decides_otherwise() -> None:
    silent = member("b", report={"last_seen_at": ago(11)})
    one = round_of(fleet(member("a"), silent, cell("c1", "a", "b")))
    (moved,) = one.decided[0].decisions
    assert isinstance(moved, MoveNode)
    assert moved.to is NodeState.SUSPECT
    assert replay(RECONCILER, one, {"suspect_after_s": "10"}).is_same
    done = replay(RECONCILER, one, {"suspect_after_s": "60"})
    assert [(each.recorded, each.replayed) for each in done.compared if each.planner == "plan_liveness"] == [
        (True, False)
    ]
    assert not done.is_same


def test_a_decision_that_only_the_replay_makes_is_shown() -> None:
    one = replace(round_of(silent_fleet()), decided=(Decided("plan_liveness", (), ()),))
    (new,) = replay(RECONCILER, one).compared
    assert isinstance(new.decision, MoveNode)
    assert (new.recorded, new.replayed, new.decision.node) == (False, True, "b")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"lost_after": "1"}, "near: lost_after_s"),
        ({"faults.lost_after_s": "1"}, "near: lost_after_s"),
        ({"faults": "1"}, "there is no setting 'faults'"),
        ({"lost_after_s.x": "1"}, "there is no setting"),
        ({"autoscaler.down_after": "1"}, "near: autoscaler.down_after_s"),
        ({"down_after_s": "1"}, "near: autoscaler.down_after_s"),
        ({"autoscaler.target_utilisation": "0.95"}, "autoscaler.target_utilisation"),
        ({"autoscaler.mode": "dictator"}, "autoscaler.mode"),
        ({"autopilot.step": "nan"}, "at least 0"),
        ({"autopilot.utilisation_cap": "1e999"}, "autopilot.utilisation_cap"),
        ({"publication.residency": "x" * 5000}, "publication.residency"),
        ({"reconciler.lost_after_s": "1"}, "near: lost_after_s"),
        ({"lost_after_s": "soon"}, "a number of at least 0, not 'soon'"),
        ({"lost_after_s": "-1"}, "at least 0"),
        ({"lost_after_s": "nan"}, "at least 0"),
        ({"lost_after_s": "1e999"}, "at least 0"),
        ({"launches_per_pass": "1.5"}, "a whole number"),
        ({"launches_per_pass": "9" * 5000}, "a whole number"),
        ({f"x{number}": "1" for number in range(21)}, "the limit is 20"),
    ],
)
def test_a_setting_that_does_not_exist_or_fit_is_refused(changes: dict[str, str], why: str) -> None:
    with pytest.raises(InvalidSetting, match=why):
        changes_by_loop(LOOPS.values(), changes)


def test_a_setting_with_which_a_planner_cannot_decide_is_refused() -> None:
    def plan_broken(*_: object) -> tuple[Any, ...]:
        raise ZeroDivisionError("division by zero")

    loop, one = replace(RECONCILER, planners=(plan_broken,)), round_of(silent_fleet())
    with pytest.raises(InvalidSetting, match="cannot decide with lost_after_s=0: division by zero"):
        replay(loop, one, {"lost_after_s": "0"})
    with pytest.raises(ZeroDivisionError):
        replay(loop, one)


def test_every_setting_can_be_named() -> None:
    names = names_of_settings(FleetSettings)
    assert {"lost_after_s", "faults.close_after_s", "ledger.region_floor"} <= set(names)
    changed = settings_changed(SETTINGS, {"faults.close_after_s": "5", "launches_per_pass": "3"})
    assert (changed.faults.close_after_s, changed.launches_per_pass) == (5.0, 3)


def windows(*indices: int) -> tuple[StepWindow, ...]:
    return tuple(StepWindow(index, "c1", 3, {4: 200}, {4: 10.5}) for index in indices)


def test_a_difference_is_exact_for_every_form_of_change() -> None:
    signal = SignalView("a", "xid-79", "fell off the bus", "local.cpu", ago(9), ago(8))
    first = fleet(node("a"), node("b"), node("c"), cell("c1", "a"), cell("c2", "b"))
    first = replace(first, faults=FaultsView(windows={"a": windows(1, 2, 3), "b": windows(1)}))
    second = replace(
        first,
        nodes={name: first.nodes[name] for name in ("a", "c")} | {"d": node("d")},
        cells={"c0": cell("c0"), **first.cells, "c9": cell("c9", "d")},
        listening_since=None,
        faults=FaultsView(
            signals=(signal,),
            windows={"a": windows(2, 3, 4), "b": windows(7)},
            muted=frozenset({("a", "b")}),
            sharing={("m", "0"): ("a", "c")},
        ),
    )
    third = replace(second, nodes=dict(reversed(list(second.nodes.items()))), cells={}, faults=FaultsView())
    fourth = replace(third, nodes={**third.nodes, "a": replace(third.nodes["a"], spare_since=None, topology=())})
    rounds = [Round(view, SETTINGS, NOW, ()) for view in (first, second, third, fourth)]
    for then, now in zip(rounds, chained(rounds), strict=True):
        assert now == then
        assert list(now.view.nodes) == list(then.view.nodes)
        assert list(now.view.cells) == list(then.view.cells)


def test_what_did_not_change_takes_no_space() -> None:
    one = round_of(silent_fleet())
    assert len(encode_round(one, replace(one.view))) < len(encode_round(one, None)) / 2


def test_bytes_of_other_types_are_refused() -> None:
    with pytest.raises(CannotDecode, match="types of its snapshots differ"):
        list(decode_rounds(RECONCILER, [encode_round(round_of(silent_fleet()), None)], "another"))


def packed(**fields: Any) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"no zlib",
        encode_round(round_of(silent_fleet()), None)[:-9],
        packed(now=NOW, decided=[], view={"nodes": {}}, settings={}),
        packed(now=NOW, decided=[["p", [["NoDecision", {}]], [True]]], edit=None),
        packed(now=NOW, decided=[], edit=["#", [], [], [[["x"], "=", [9], [1]]]]),
        packed(decided=[]),
    ],
)
def test_damaged_bytes_are_refused_with_their_place(damaged: bytes) -> None:
    whole = encode_round(round_of(silent_fleet()), None)
    with pytest.raises(CannotDecode, match="row 2 of its chain is damaged"):
        list(decode_rounds(RECONCILER, [whole, damaged], schema_of(RECONCILER)))
