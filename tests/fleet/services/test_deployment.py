from collections.abc import Callable
from typing import Any

import pytest

from fleet.models import DeploymentRegion
from fleet.planning.autoscaling.policy import CELLS_MOST
from fleet.services.deployment import deployment_scale
from kernel.models import Event
from kernel.refusals import InvalidInput
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


def wanted() -> dict[str, int]:
    return dict(DeploymentRegion.objects.values_list("region_id", "cells"))


def test_each_changed_region_is_one_event() -> None:
    rows.deployment(cells=1)
    rows.deployment(cells=2, where="us-west-2")
    rows.region("eu-central-1")
    cells = {"us-east-1": 3, "us-west-2": 2, "eu-central-1": 1}
    assert deployment_scale(name="sim-70b", cells=cells, actor="ada", now=NOW)
    assert wanted() == cells
    assert {event.region: event.detail for event in Event.objects.all()} == {
        "us-east-1": {"was": 1, "cells": 3},
        "eu-central-1": {"was": 0, "cells": 1},
    }


def test_what_is_so_already_is_not_recorded_and_rings_nobody(
    django_capture_on_commit_callbacks: Callable[..., Any],
) -> None:
    rows.deployment(cells=2)
    with django_capture_on_commit_callbacks() as callbacks:
        assert not deployment_scale(name="sim-70b", cells={"us-east-1": 2}, actor="ada", now=NOW)
    assert not Event.objects.exists()
    assert not callbacks


@pytest.mark.parametrize(("cells", "rule"), [({"mars": 1}, "exists"), ({"us-east-1": -1}, "range")])
def test_nothing_changes_when_one_part_is_wrong(cells: dict[str, int], rule: str) -> None:
    rows.deployment(cells=2)
    rows.region("eu-central-1")
    with pytest.raises(InvalidInput) as refused:
        deployment_scale(name="sim-70b", cells={"eu-central-1": 1, **cells}, actor="ada", now=NOW)
    assert refused.value.rule == rule
    assert wanted() == {"us-east-1": 2}


def test_a_slip_of_the_finger_buys_no_machines() -> None:
    rows.deployment()
    with pytest.raises(InvalidInput, match="from 0 to 1000"):
        deployment_scale(name="sim-70b", cells={"us-east-1": CELLS_MOST + 1}, actor="ada", now=NOW)
