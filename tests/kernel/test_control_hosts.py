"""The hosts of a control plane, and which of them are silent."""

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from kernel import clock
from kernel.control_hosts import (
    SILENT_AFTER_S,
    ControlHosts,
    ControlHostStanding,
    control_host_left,
    control_host_seen,
    control_hosts,
)
from kernel.models import ControlHost

SEEN = datetime(2026, 11, 23, 20, 30, 5, tzinfo=timezone(timedelta(hours=1)))
FIRST = ControlHostStanding("control-1", SEEN, 0.5)
SECOND = ControlHostStanding("control-2", SEEN, 0.5)
SILENT = replace(SECOND, silent_s=SILENT_AFTER_S + 1)


def test_two_that_are_well_are_one_line_without_a_problem() -> None:
    hosts = ControlHosts((FIRST, SECOND))
    assert (str(hosts), hosts.problems) == ("control-1, control-2", {})


def test_a_control_plane_of_one_host_says_nothing() -> None:
    assert str(ControlHosts((FIRST,))) == ""


def test_one_that_is_silent_says_since_when() -> None:
    hosts = ControlHosts((FIRST, SILENT))
    assert str(hosts) == "control-1, control-2 silent since 2026-11-23 19:30:05 UTC"
    assert hosts.problems == {"control-2": "control-2 has not reported since 2026-11-23 19:30:05 UTC"}


def test_silence_is_said_in_the_same_words_hours_later() -> None:
    """An incident keeps the sentence with which it was opened."""
    assert ControlHosts((SILENT,)).problems == ControlHosts((replace(SILENT, silent_s=6 * 3600.0),)).problems


@pytest.mark.django_db
def test_a_host_counts_from_its_first_report_until_it_leaves_or_was_silent_for_an_hour() -> None:
    control_host_seen("control-1")
    control_host_seen("control-2")
    assert [host.name for host in control_hosts().hosts] == ["control-1", "control-2"]
    ControlHost.objects.update(seen_at=clock.now() - timedelta(minutes=59))
    control_host_seen("control-1")
    assert [host.is_silent for host in control_hosts().hosts] == [False, True]
    ControlHost.objects.filter(name="control-2").update(seen_at=clock.now() - timedelta(minutes=61))
    control_host_seen("control-1")
    assert [host.name for host in control_hosts().hosts] == ["control-1"]
    control_host_left("control-1")
    assert control_hosts().hosts == ()
