"""A cloud machine over HTTP: place, price and notices."""

from datetime import timedelta
from typing import Any

import pytest

from fleet.clouds.models import CloudNotice
from fleet.reconcile.planning.states import MachineState, NoticeKind, NoticeSource
from tests.controlplane.api.client import bearer
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


def test_a_machine_says_where_it_is_and_what_was_announced_until_that_is_over() -> None:
    rows.node("n-1", topology=["use1-az1", "nn-1", "nn-2", "nn-3"])
    columns: dict[str, Any] = {"zone": "us-east-1a", "market": "spot", "price_per_hour": 6.5, "cloud_state": "running"}
    machine = rows.machine("m-1", where="us-east-1", runs="n-1", state=MachineState.TAKEN, **columns)
    for number, settled_at in enumerate((None, NOW)):
        CloudNotice.objects.create(
            machine=machine, kind=NoticeKind.INTERRUPTION, source=NoticeSource.EVENTS,
            at=NOW, ends_at=NOW + timedelta(minutes=2), text=f"said {number}", settled_at=settled_at,
        )  # fmt: skip
    shown = bearer().get("/api/v1/machines/m-1/").json()
    assert {name: shown[name] for name in columns} == columns
    assert shown["network_nodes"] == ["use1-az1", "nn-1", "nn-2", "nn-3"]
    assert "Its provider announced interruption, ends at 2026-11-21 12:02:00 UTC: said 0." in shown["notices"]
    assert not any("said 1" in notice for notice in shown["notices"])
