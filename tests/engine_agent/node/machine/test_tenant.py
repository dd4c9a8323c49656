"""The variables that a machine passes to its agent."""

from pathlib import Path

import pytest

from engine_agent.node.machine.paths import HostPaths
from engine_agent.node.machine.tenant import Tenant


def test_where_artifacts_come_from_is_passed_on_and_keys_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = {
        "AWS_REGION": "eu-west-1",
        "AWS_ENDPOINT_URL": "http://10.0.0.5:5000",
        "AWS_ENDPOINT_URL_S3": "http://10.0.0.6:5000",
        "SWITCHYARD_ARTIFACT_CACHE_GIB": "200",
    }
    for name, value in {**passed, "AWS_SECRET_ACCESS_KEY": "secret", "SWITCHYARD_JOIN_TOKEN": "secret"}.items():
        monkeypatch.setenv(name, value)
    environment = Tenant("n-00000001", HostPaths(tmp_path), tmp_path)._environment("n-00000001")
    assert environment.items() >= passed.items()
    assert "secret" not in environment.values()
    cache = Path(environment["SWITCHYARD_CACHE"])
    assert not cache.is_relative_to(tmp_path / "state" / "runs")  # which goes with the tenant
    assert cache.is_relative_to(tmp_path / "state")  # which goes with the machine
