"""Machines that a provider runs without a node are terminated after two lists."""

import pytest

from fleet.clouds.services import garbage as garbage_collection
from fleet.clouds.services.garbage import provider_garbage_collect
from fleet.faults.models import Incident
from fleet.reconcile.planning.snapshot import ProviderStatus
from fleet.reconcile.planning.states import NodeState
from kernel.models import Event
from tests.fleet import rows
from tests.fleet.cloud import Cloud
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Cloud:
    found = Cloud()
    monkeypatch.setattr(garbage_collection, "provider_named", lambda name: found)
    return found


def test_a_machine_that_runs_after_its_end_was_confirmed_is_terminated_again(cloud: Cloud) -> None:
    rows.node("n-00000001")
    rows.node("n-00000002", state=NodeState.RETIRED.value, terminated_at=NOW)
    rows.node("n-00000003", state=NodeState.RETIRED.value)  # its provider is still terminating it
    cloud.statuses = dict.fromkeys(("n-00000001", "n-00000002", "n-00000003"), ProviderStatus.RUNNING)
    suspects = provider_garbage_collect("cloud", {}, now=NOW)
    assert suspects == {"n-00000002": NOW}
    assert cloud.terminated == []
    provider_garbage_collect("cloud", suspects, now=NOW)
    assert cloud.terminated == ["n-00000002"]
    assert Event.objects.get(kind="garbage.deleted").node == "n-00000002"


def test_a_provider_that_does_not_answer_keeps_its_suspects(cloud: Cloud) -> None:
    cloud.silent = True
    assert provider_garbage_collect("cloud", {"n-00000001": NOW}, now=NOW) == {"n-00000001": NOW}


def test_a_machine_that_was_not_terminated_is_tried_after_the_next_list(cloud: Cloud) -> None:
    cloud.statuses, cloud.broken = {"n-00000009": ProviderStatus.RUNNING}, True
    suspects = provider_garbage_collect("cloud", {"n-00000009": NOW}, now=NOW)
    assert suspects == {"n-00000009": NOW}
    assert not Event.objects.exists()
    cloud.broken = False
    provider_garbage_collect("cloud", suspects, now=NOW)
    assert cloud.terminated == ["n-00000009"]


def test_many_unknown_machines_are_held_and_open_an_incident(cloud: Cloud) -> None:
    cloud.statuses = dict.fromkeys(("n-00000001", "n-00000002", "n-00000003"), ProviderStatus.RUNNING)
    before = dict.fromkeys(cloud.statuses, NOW)
    provider_garbage_collect("cloud", before, now=NOW)
    incident = Incident.objects.get()
    assert (incident.kind, incident.subject, cloud.terminated) == ("garbage-held", "provider cloud", [])
    rows.node("n-00000001")
    provider_garbage_collect("cloud", before, now=NOW)
    assert cloud.terminated == ["n-00000002", "n-00000003"]
    incident.refresh_from_db()
    assert incident.state != "open"
