"""What scenarios take from a laboratory's record, and what they say of one that they cannot use."""

import json
import os
from pathlib import Path

import pytest

from lab.hosts import client
from lab.hosts.conditions import Conditions, write_state
from lab.hosts.topology import Topology
from tests.scenarios.lab_fleet import LabFleet

DASHBOARD = client.Forward(8000, "c1", 8000, by_loopback=True)
INGRESSES = [client.Forward(8080 + number, f"i{number + 1}", 8080) for number in range(4)]


def record(home: Path, topology: Topology, forwards: list[client.Forward]) -> Path:
    (home / "lab").mkdir()
    said = {"pid": os.getpid(), **write_state(topology, Conditions()), "forwards": [list(each) for each in forwards]}
    (home / "lab" / "lab.json").write_text(json.dumps(said))
    return home


def test_addresses_are_those_of_the_record(tmp_path: Path) -> None:
    fleet = LabFleet(record(tmp_path, Topology(), [DASHBOARD, *INGRESSES]))
    assert fleet.url == "http://127.0.0.1:8000"
    assert [fleet.ingress(), fleet.ingress("us-west-2")] == ["http://127.0.0.1:8080", "http://127.0.0.1:8082"]
    token = tmp_path / "lab/hosts/c1/files/var/lib/switchyard/operator-token"
    token.parent.mkdir(parents=True)
    token.write_text("secret\n")
    assert fleet.token() == "secret"


@pytest.mark.parametrize(
    ("topology", "forwards", "said"),
    [
        (None, [], "No laboratory runs in"),
        (Topology(regions=("us-east-1",)), [DASHBOARD], "need a laboratory with us-west-2"),
        (Topology(), [], "without a fleet"),
    ],
)
def test_a_laboratory_that_scenarios_cannot_use_is_named(
    tmp_path: Path, topology: Topology | None, forwards: list[client.Forward], said: str
) -> None:
    if topology is not None:
        record(tmp_path, topology, forwards)
    with pytest.raises(pytest.UsageError, match=said):
        LabFleet(tmp_path)
