"""The autoscaler, the autopilot and the publication of tables record what they decided. Decided again, it is the same;
other settings decide otherwise; the reasons name inputs, limits and the other choices."""

from datetime import timedelta

import pytest

from controlplane.explained import LOOPS
from fleet.autoscaling.planning.policy import CellRange
from fleet.autoscaling.planning.recording import AUTOSCALER
from fleet.cells.models import Cell
from fleet.deployments.services.deployments import deployment_change, deployment_scale
from fleet.recorder.models import RecordedRound
from fleet.recorder.planning.loops import RecordedLoop
from fleet.recorder.planning.replay import replay
from fleet.recorder.selectors import StoredReason, alternatives_of, reasons_about, rounds_decoded
from fleet.recorder.services import Recorder
from tests.traffic.steered import EAST, WEST, Steered
from traffic.capacity.services import autoscaling_run
from traffic.region_shares.planning.recording import AUTOPILOT
from traffic.region_shares.services.overrides import Terms, shares_fix
from traffic.routing.planning.recording import PUBLICATION
from traffic.routing.services.tables import tables_publish

pytestmark = pytest.mark.django_db


class Recorded(Steered):
    """Two regions whose autopilot, autoscaler and publication record their passes."""

    def __init__(self, rates: dict[str, float]) -> None:
        super().__init__({EAST: 3, WEST: 3}, rates)
        self.record()
        self.recorder = Recorder(AUTOSCALER)

    def scaled(self, **policy: object) -> None:
        """A pass of the autoscaler with this policy."""
        ranges = dict.fromkeys((EAST, WEST), CellRange(1, 9))
        deployment_scale(name="sim-70b", cells=ranges, actor="ada", now=self.now)
        scaling = {"mode": "act", "start_up_s": 30, **policy}
        deployment_change(name="sim-70b", actor="ada", now=self.now, scaling=scaling)
        Cell.objects.update(state_since=self.now - timedelta(hours=1))
        autoscaling_run(now=self.now, recorder=self.recorder)


def outcomes(loop: RecordedLoop, **changes: str) -> list[bool]:
    """Whether each recorded round decides the same again."""
    rows = RecordedRound.objects.filter(loop=loop.name)
    return [replay(loop, one, changes).is_same for _, one in rounds_decoded(rows, LOOPS)]


def about(subject: str, decision: str) -> list[StoredReason]:
    return [one for one in reasons_about(subject, 20, LOOPS) if one.decision == decision]


def test_the_size_of_a_deployment_tells_its_load_limits_and_what_other_rules_asked_for() -> None:
    fleet = Recorded({EAST: 25.0, WEST: 2.0})
    fleet.run(20)
    fleet.scaled()
    (grown,) = about("deployment:sim-70b", "SetCells")
    assert grown.reason.startswith("3 to 4 cells in us-east-1: 25.0 concurrent requests need 4 cells")
    assert (grown.rule, grown.inputs["cells"], grown.inputs["per_cell"]) == ("utilisation", 3, 10)
    assert grown.inputs["in_flight"] == pytest.approx(25, abs=0.5)
    assert (grown.limits["range"], grown.limits["target_utilisation"]) == ("1 to 9", 0.7)
    others = {one.name: one.why_not for one in alternatives_of(grown, LOOPS)}
    assert others["1 cell by min"].endswith("another rule asks for more")
    assert outcomes(AUTOSCALER) == [True]
    assert sizes(target_utilisation="0.8") == {EAST: 4}, "the cap of the autopilot limits the target"
    assert sizes(target_utilisation="0.5") == {EAST: 5}


def sizes(**changes: str) -> dict[str, int]:
    """The numbers of cells that the only recorded pass would have set."""
    ((_, one),) = rounds_decoded(rows(), LOOPS)
    decided = [found.decision for found in replay(AUTOSCALER, one, changes).compared if found.replayed]
    return {one.region: one.wanted for one in decided}


def rows() -> list[RecordedRound]:
    return list(RecordedRound.objects.filter(loop=AUTOSCALER.name))


def test_a_pass_that_changes_nothing_records_nothing_and_shadow_mode_says_so() -> None:
    fleet = Recorded({EAST: 25.0, WEST: 2.0})
    fleet.run(20)
    fleet.scaled(mode="shadow")
    (grown,) = about("deployment:sim-70b", "SetCells")
    assert grown.reason.endswith("not carried out, because it is in shadow mode or paused")
    autoscaling_run(now=fleet.now, recorder=fleet.recorder)
    assert len(rows()) == 1
    assert outcomes(AUTOSCALER) == [True]


@pytest.mark.slow
def test_shares_tell_loads_limits_and_why_a_region_gets_none() -> None:
    fleet = Recorded({EAST: 15.0, WEST: 12.0})
    fleet.run(20)
    fleet.lose(EAST, 2)
    fleet.run(2)
    relief, first = about("share:sim-70b@us-east-1", "ShiftTraffic")
    assert (relief.rule, first.rule) == ("relief", "first")
    assert relief.inputs["from us-east-1"].startswith("us-east-1 100% -> ")
    assert relief.inputs["us-east-1"].endswith("of 10 concurrent requests")
    assert relief.limits == {"utilisation_cap": 0.8, "worth_relief": 0.02}
    assert [one.name for one in alternatives_of(first, LOOPS)] == ["us-east-1 to us-west-2", "us-west-2 to us-east-1"]
    fleet.silent |= {EAST, WEST}
    fleet.run(24)
    (kept,) = about("share:sim-70b", "KeepTable")
    assert (kept.rule, kept.limits["stale_after_s"]) == ("hold", 15.0)
    terms = Terms(duration_s=600, why="a test", actor="ada", now=fleet.now)
    shares_fix(deployment="sim-70b", origin=EAST, shares={EAST: 0.5, WEST: 0.5}, terms=terms)
    fleet.run(2)
    assert about("share:sim-70b@us-east-1", "ShiftTraffic")[0].rule == "ordered"
    assert set(outcomes(AUTOPILOT)) == {True}
    assert outcomes(AUTOPILOT, stale_after_s="60")[:2] == [True, True]
    assert False in outcomes(AUTOPILOT, stale_after_s="60"), "reports of half a minute ago would still count"
    assert False in outcomes(AUTOPILOT, utilisation_cap="0.4")


@pytest.mark.slow
def test_a_table_tells_what_it_followed_from_and_another_policy_publishes_another_one() -> None:
    fleet = Recorded({EAST: 12.0, WEST: 12.0})
    fleet.run(4)
    fleet.lose(EAST, 3)
    tables_publish(now=fleet.now, recorder=fleet.publications)
    lost, *_ = about("share:sim-70b@us-east-1", "PublishTable")
    assert lost.reason == "routing table of us-east-1: sim-70b to us-west-2 100%"
    assert lost.inputs["sim-70b"].endswith("the autopilot planned us-east-1 100%")
    (other,) = alternatives_of(lost, LOOPS)
    assert (other.name, other.why_not) == ("sim-70b to us-east-1", "it has no ready cell")
    fleet.recover(EAST)
    tables_publish(now=fleet.now, recorder=fleet.publications)
    assert outcomes(PUBLICATION) == [True] * RecordedRound.objects.filter(loop=PUBLICATION.name).count()
    assert RecordedRound.objects.filter(loop=PUBLICATION.name, base__isnull=False).exists()
    assert set(outcomes(PUBLICATION, load_bound="1.25")) == {False}
