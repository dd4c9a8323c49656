"""Uses of a version that the fleet reports to the model registry."""

import pytest

from fleet.deployments.selectors import version_uses
from models_registry.versions import selectors as fleet_hooks
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


def test_without_a_fleet_nothing_passes_for_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_hooks, "_fleet", fleet_hooks._Registered())
    with pytest.raises(LookupError, match="no fleet has registered the users"):
        fleet_hooks.version_uses(1)
