"""A backup of a running fleet, restored as on another host: the control plane there has everything that was
acknowledged.
"""

from pathlib import Path

import pytest

from tests.scenarios.running_fleet import RunningFleet

pytestmark = [pytest.mark.long, pytest.mark.scenario, pytest.mark.timeout(900)]


def test_a_backup_of_a_running_fleet_starts_elsewhere_with_its_records_and_secrets(
    fleet: RunningFleet, tmp_path: Path
) -> None:
    newest = fleet.api("audit")["results"][0]
    fleet.back_up(tmp_path / "fleet.backup")
    elsewhere = RunningFleet(tmp_path / "home")
    try:
        elsewhere.restore(tmp_path / "fleet.backup")
        elsewhere.begin()  # with the original operator token
        assert newest in elsewhere.api("audit")["results"]
        for kind in ("deployments", "models", "regions"):
            assert [row["name"] for row in elsewhere.api(kind)["results"]] == [
                row["name"] for row in fleet.api(kind)["results"]
            ]
        assert elsewhere.cells().keys() == fleet.cells().keys()
    finally:
        elsewhere.down()
    assert elsewhere.processes() == []
