"""Uses of a version that the fleet reports to the model registry."""

import pytest

from fleet.deployments.selectors import instance_shapes, version_uses
from fleet.regions.models import InstanceType
from models_registry.versions import selectors as fleet_hooks
from models_registry.versions.planning.machines import INSTANCE_TYPES
from tests.fleet import rows

pytestmark = pytest.mark.django_db


def test_a_version_that_nothing_uses_has_no_uses() -> None:
    assert version_uses(rows.version("2").pk) == []


def test_deployments_and_live_cells_are_uses() -> None:
    rows.deployment()
    rows.cell("a")
    rows.cell("b", state="lost")
    rows.cell("c", state="stopped")
    assert version_uses(rows.version().pk) == ["deployment sim-70b", "cell a", "cell b"]
    assert fleet_hooks.version_uses(rows.version().pk) == version_uses(rows.version().pk)


def test_the_fleets_own_instance_types_win_over_the_public_ones() -> None:
    InstanceType.objects.create(name="p5.48xlarge", accelerator="h100", cores=4)
    InstanceType.objects.create(name="own.gpu", accelerator="b200", cores=2)
    known = instance_shapes()
    assert known["p5.48xlarge"].cores == 4
    assert known["own.gpu"].cores == 2
    assert known["trn1.32xlarge"] == INSTANCE_TYPES["trn1.32xlarge"]
    assert fleet_hooks.instance_shapes() == known


def test_without_a_fleet_nothing_passes_for_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_hooks, "_fleet", fleet_hooks._Registered())
    with pytest.raises(LookupError, match="no fleet has registered the users"):
        fleet_hooks.version_uses(1)
    with pytest.raises(LookupError, match="no fleet has registered its instance types"):
        fleet_hooks.instance_shapes()
