"""A silent control host has an incident until it reports again."""

from datetime import timedelta

import pytest

from fleet.faults.models import Incident
from fleet.faults.services.watch import CONTROL_HOST, ControlHostWatch
from kernel import clock
from kernel.control_hosts import control_host_left, control_host_seen
from kernel.models import ControlHost
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


def opened() -> list[str]:
    return sorted(Incident.objects.filter(kind=CONTROL_HOST, state="open").values_list("subject", flat=True))


def silence(name: str) -> None:
    ControlHost.objects.filter(name=name).update(seen_at=clock.now() - timedelta(minutes=1))


@pytest.fixture
def watch() -> ControlHostWatch:
    control_host_seen("control-1")
    control_host_seen("control-2")
    watch = ControlHostWatch()
    watch.check(NOW)
    watch.check(NOW)
    assert opened() == []
    return watch


def test_silence_that_lasts_longer_than_a_look_is_one_incident_until_the_host_is_heard(watch: ControlHostWatch) -> None:
    silence("control-2")
    watch.check(NOW)
    assert opened() == []
    watch.check(NOW)
    watch.check(NOW)
    assert opened() == ["control-2"]
    assert Incident.objects.count() == 1
    control_host_seen("control-2")
    watch.check(NOW)
    assert opened() == []
    assert Incident.objects.get().resolution == "it reports again"


def test_a_host_that_left_in_order_is_not_missed(watch: ControlHostWatch) -> None:
    silence("control-2")
    watch.check(NOW)
    watch.check(NOW)
    control_host_left("control-2")
    watch.check(NOW)
    assert opened() == []
    assert Incident.objects.get().resolution == "it no longer counts as a host of the control plane"
