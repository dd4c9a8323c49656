"""Notices from nodes' metadata: about their own machine, limited in rate, and ending."""

from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from engine_agent.protocol.messages import MachineNotice, NodeTelemetry, Observed, Report
from engine_agent.protocol.states import EngineState, MachineNoticeKind
from fleet.clouds.models import CloudNotice
from fleet.machines.services.reports import node_notices_store
from fleet.nodes.services.reports import ReceivedReport
from fleet.reconcile.planning.states import MachineState, NoticeSource
from kernel.models import Event
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db

WARNING = MachineNotice(MachineNoticeKind.INTERRUPTION, NOW.timestamp() + 100)


@pytest.fixture(autouse=True)
def machine() -> Any:
    """n-1 has a cloud machine; n-2 has none."""
    rows.node("n-1")
    rows.node("n-2")
    return rows.machine("m-1", where="us-east-1", provider="aws", runs="n-1", state=MachineState.TAKEN)


def say(*notices: MachineNotice, node: str = "n-1", after_s: float = 0.0) -> bool:
    report = Report(seq=1, observed=Observed(EngineState.IDLE), telemetry=NodeTelemetry(notices=notices))
    now = NOW + timedelta(seconds=after_s)
    return node in node_notices_store([ReceivedReport(node, "k", True, NOW, now, report)], now=now)


def test_a_warning_counts_at_once_for_its_own_machine() -> None:
    assert say(WARNING)
    notice = CloudNotice.objects.get()
    assert (notice.machine_id, notice.source, notice.settled_at) == ("m-1", NoticeSource.IMDS, None)
    assert notice.ends_at == NOW + timedelta(seconds=100)
    assert Event.objects.get(kind="node.notice").node == "n-1"


def test_who_is_in_no_cloud_says_nothing_of_it() -> None:
    assert say(WARNING, node="n-2")
    assert not CloudNotice.objects.exists()


def test_ends_that_make_no_sense_are_bounded() -> None:
    say(replace(WARNING, ends_at=1e300))
    assert CloudNotice.objects.get().ends_at == NOW + timedelta(days=60)


def test_what_changes_all_the_time_is_kept_once_a_minute_and_in_one_row() -> None:
    for number in range(50):
        said = () if number % 2 else (replace(WARNING, ends_at=NOW.timestamp() + number),)
        assert say(*said, after_s=number) is (number == 0)
    assert Event.objects.filter(kind="node.notice").count() == 1
    assert say(after_s=70)
    assert CloudNotice.objects.get().settled_at is not None
    assert say(WARNING, after_s=140)
    assert CloudNotice.objects.get().settled_at is None


def test_what_was_heard_before_a_restart_of_ours_is_known() -> None:
    assert say(WARNING)
    assert say(WARNING, after_s=2)
    assert Event.objects.filter(kind="node.notice").count() == 1
