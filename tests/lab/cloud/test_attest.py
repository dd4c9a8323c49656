"""The program that attests a machine, on a machine of the test cloud, with a real control plane."""

import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleet.agents.planner import ProofRefused
from fleet.agents.services.enrolment import machine_attest
from fleet.clouds.models import CloudRegion
from fleet.clouds.planning.upkeep import CloudBase
from fleet.machines.models import Machine
from fleet.reconcile.planning.states import MachineState
from kernel import clock
from lab.cloud.imds import serve_metadata
from lab.cloud.server import World
from tests.fleet import rows
from tests.fleet.proofs import ATTEST
from tests.lab.cloud.conftest import Network
from tests.lab.cloud.test_imds import give_role

pytestmark = [pytest.mark.cloud, pytest.mark.django_db]


def test_a_machine_proves_itself_once(
    world: World, network: Network, settings: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    profile = {"Arn": give_role(world)}
    [instance] = network.launch(IamInstanceProfile=profile)
    address = network.ec2.describe_instances()["Reservations"][0]["Instances"][0]["PrivateIpAddress"]
    settings.AGENT_URLS = ["https://control.example:8443"]
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", world.endpoint)
    base = CloudBase(account=world.account, zones={}, node_group="", node_profile="", node_role="node")
    CloudRegion.objects.create(
        region=rows.region("us", provider="aws"), aws_region="us-east-1", base=msgspec.to_builtins(base)
    )
    rows.machine(
        "m-00000001", where="us", provider="aws", provider_id=instance, address=address,
        state=MachineState.TAKEN.value, runs="n-00000001", facts=None,
    )  # fmt: skip
    listener = socket.create_server(("127.0.0.1", 0))
    environment = {
        "PATH": os.environ["PATH"],
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://127.0.0.1:{listener.getsockname()[1]}",
        "SERVER": "https://control.example:8443",
        "STS_HOST": world.endpoint.removeprefix("http://"),
        "UNIT": "u-1",
    }

    def prove(nonce: str) -> bytes:
        command = [sys.executable, str(ATTEST), str(tmp_path / nonce)]
        return subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60).stdout

    with serve_metadata(world, instance, listener):
        first, again, stranger = prove("nonce"), prove("nonce"), prove("other")
    assert stat.S_IMODE((tmp_path / "nonce").stat().st_mode) == 0o600
    assert machine_attest(first, now=clock.now())
    assert machine_attest(again, now=clock.now())
    assert Machine.objects.get().nonce_digest in json.loads(first)["headers"]["x-switchyard-server"]
    with pytest.raises(ProofRefused, match="has attested itself already, with another nonce"):
        machine_attest(stranger, now=clock.now())
    forged = json.loads(stranger)
    forged["headers"]["x-switchyard-server"] = json.loads(first)["headers"]["x-switchyard-server"]
    with pytest.raises(ProofRefused, match="STS rejected the signature: SignatureDoesNotMatch"):
        machine_attest(json.dumps(forged).encode(), now=clock.now())


def test_without_a_metadata_service_it_says_so(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
    environment = {"PATH": os.environ["PATH"], "AWS_EC2_METADATA_SERVICE_ENDPOINT": nobody}
    command = [sys.executable, str(ATTEST), str(tmp_path / "nonce")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    said = "switchyard: this machine cannot prove which one it is: the metadata service of this instance does not"
    assert ended.stderr.startswith(said)
    assert not (tmp_path / "nonce").exists()
