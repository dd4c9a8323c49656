"""A control host that is silent, and a database without a standby, are incidents until they are over."""

from datetime import timedelta

import pytest

from fleet.models import Incident
from fleet.services.host_watch import KIND, ControlHostWatch
from kernel import clock
from kernel.models import ControlHost
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


def host(name: str, database: str, commits: str = "") -> None:
    now = clock.now()
    ControlHost.objects.create(
        name=name,
        address="10.0.0.1",
        agent_url="https://10.0.0.1:8443",
        joined_at=now,
        seen_at=now,
        database=database,
        commits=commits,
        commits_since=now,
    )


def opened() -> list[str]:
    return sorted(Incident.objects.filter(kind=KIND, state="open").values_list("subject", flat=True))


def test_what_lasts_longer_than_a_look_is_an_incident_until_it_is_over() -> None:
    host("control-1", "primary", "synchronous")
    host("control-2", "standby")
    watch = ControlHostWatch()
    watch.look(NOW)
    watch.look(NOW)
    assert opened() == []
    ControlHost.objects.filter(name="control-1").update(commits="asynchronous")
    ControlHost.objects.filter(name="control-2").update(seen_at=clock.now() - timedelta(minutes=1))
    watch.look(NOW)
    assert opened() == []
    watch.look(NOW)
    watch.look(NOW)
    assert opened() == ["control-2", "standby"]
    assert Incident.objects.count() == 2
    ControlHost.objects.filter(name="control-1").update(commits="synchronous")
    ControlHost.objects.filter(name="control-2").update(seen_at=clock.now())
    watch.look(NOW)
    assert opened() == []


def test_a_control_plane_of_one_host_has_none() -> None:
    watch = ControlHostWatch()
    watch.look(NOW)
    watch.look(NOW)
    assert opened() == []
