"""Orphans: what a provider runs and no node is."""

import pytest

from fleet.planning.snapshot import ProviderStatus
from fleet.planning.states import NodeState
from fleet.services import orphans
from fleet.services.orphans import orphans_end
from kernel.models import Event
from tests.fleet import rows
from tests.fleet.cloud import Cloud
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Cloud:
    found = Cloud()
    monkeypatch.setattr(orphans, "provider_named", lambda name: found)
    return found


def test_a_machine_whose_end_was_confirmed_and_that_runs_is_ended_again(cloud: Cloud) -> None:
    rows.node("n-00000001")
    rows.node("n-00000002", state=NodeState.RETIRED.value, terminated_at=NOW)
    rows.node("n-00000003", state=NodeState.RETIRED.value)  # its provider is at it
    cloud.statuses = dict.fromkeys(("n-00000001", "n-00000002", "n-00000003"), ProviderStatus.RUNNING)
    suspects = orphans_end("cloud", (), now=NOW)
    assert suspects == {"n-00000002"}
    assert cloud.terminated == []
    orphans_end("cloud", suspects, now=NOW)
    assert cloud.terminated == ["n-00000002"]
    assert Event.objects.get(kind="machine.orphan_ended").node == "n-00000002"


def test_a_provider_that_says_nothing_changes_nothing(cloud: Cloud) -> None:
    cloud.silent = True
    assert orphans_end("cloud", {"n-00000001"}, now=NOW) == {"n-00000001"}


def test_what_cannot_be_ended_is_tried_in_the_next_look(cloud: Cloud) -> None:
    cloud.statuses, cloud.broken = {"n-00000009": ProviderStatus.RUNNING}, True
    assert orphans_end("cloud", {"n-00000009"}, now=NOW) == {"n-00000009"}
    assert not Event.objects.exists()
