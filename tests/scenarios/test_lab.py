"""A fleet on separate hosts: a control plane, an ingress and two nodes that joined, each with its network, files and
processes. One host loses power, and the cell serves again; no plain text passes between hosts. Of two control hosts on
one database, the second takes over when the first loses power. A joined host reboots to repair its node.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lab.hosts import client
from lab.hosts.fleet import DEPLOYMENT, Fleet, read_ports
from lab.hosts.places import CHECKOUT, read_places
from tests.controlplane.embedded.processes import eventually
from tests.scenarios.running_fleet import free_ports
from tests.scenarios.test_healing import BREAK

pytestmark = [pytest.mark.long, pytest.mark.scenario, pytest.mark.own_fleet, pytest.mark.timeout(900)]

SMALL = ("--region", "us-east-1", "--nodes", "2", "--ingresses", "1", "--round-trip", "10ms")
LIMIT_S = 600.0


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Environment of the command `lab`, with a temporary home; its processes end with the test."""
    port = free_ports(3)
    own = {"SWITCHYARD_HOME": str(tmp_path), "SWITCHYARD_PORT": str(port), "SWITCHYARD_INGRESS_PORT": str(port + 2)}
    try:
        yield {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin", **own}
    finally:
        client.stop(read_places(own))


def lab(environment: dict[str, str], *arguments: str) -> str:
    """Output of the command `lab`.

    Raises:
        AssertionError: it failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "lab.hosts.cli", *arguments],
        cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def test_a_host_that_loses_its_power_is_missed_and_healed_and_every_hop_is_tls(environment: dict[str, str]) -> None:
    said = lab(environment, "up", "--detach", "--controls", "1", *SMALL)
    assert [line.split()[0] for line in said.splitlines() if " joined in " in line] == ["i1", "n1", "n2"]
    said = lab(environment, "check")
    lines = said.splitlines()
    assert "has power again, for there is no spare" in said
    assert sum("a streamed answer through i1 in us-east-1" in line for line in lines) == 2
    assert lines[-1] == "lab check: every hop between hosts is TLS, and all is well"
    assert lab(environment, "down") == "The laboratory has ended.\n"


def health(environment: dict[str, str]) -> dict[str, Any]:
    """Health of the control plane from the second control host; {} if it does not answer."""
    try:
        answer = httpx.get(f"http://127.0.0.1:{int(environment['SWITCHYARD_PORT']) + 1}/healthz", timeout=10.0)
        told: dict[str, Any] = answer.json()
    except (httpx.HTTPError, json.JSONDecodeError):
        return {}
    return told


def test_a_second_control_host_decides_when_the_first_loses_its_power(environment: dict[str, str]) -> None:
    lab(environment, "up", "--detach", "--controls", "2", *SMALL)
    assert eventually(lambda: health(environment).get("hosts_summary") == "c1, c2")
    lab(environment, "power-off", "c1")
    assert eventually(lambda: "c1 silent since" in health(environment).get("hosts_summary", ""))
    assert eventually(lambda: health(environment).get("status") == "ok"), "c2 makes the passes"
    lab(environment, "boot", "c1")
    assert eventually(lambda: bool(health(environment).get("hosts_are_well")))
    lab(environment, "check")


BOOT = "print(open('/proc/1/stat').read().rpartition(')')[2].split()[19])"
ON_CONTROL = """
import json, os, subprocess, sys
state = json.load(open("/var/lib/switchyard/up.json"))
secret = {"SECRET_KEY": "of-a-test-that-signs-nothing-0123456789-abcdefghijkl"}
found = {"DATABASE_URL": state["database_url"], "VALKEY_URL": state.get("valkey_url", ""), **secret}
home = {"SWITCHYARD_HOME": "/var/lib/switchyard"}
command = [sys.argv[1], "manage.py", "shell", "-c", sys.argv[3]]
sys.exit(subprocess.call(command, cwd=sys.argv[2], env={**os.environ, **home, **found}))
"""


@pytest.mark.long
def test_a_joined_host_reboots_once_to_repair_its_node(environment: dict[str, str]) -> None:
    lab(environment, "up", "--detach", "--controls", "1", *SMALL)
    places = read_places(environment)
    topology = client.topology_of(places)
    fleet = Fleet(places, topology, read_ports(environment), print)
    address = str(topology.host("n1").address)
    (machine,) = [row for row in fleet.rows("machines") if row["address"] == address]
    assert machine["may_reboot"]
    first = lab(environment, "exec", "n1", "--", "python3", "-S", "-c", BOOT)
    broken = ("python3", "-c", ON_CONTROL, sys.executable, str(CHECKOUT), BREAK % machine["node"])
    lab(environment, "exec", "c1", "--", *broken)
    # There is no spare, so the lost cell would keep the node, and only nodes in no cell are repaired.
    fleet.ask("PATCH", f"deployments/{DEPLOYMENT}/", {"regions": [{"region": "us-east-1", "cells": 0}]})

    def not_repaired() -> str:
        (node,) = [row for row in fleet.rows("nodes") if row["id"] == machine["node"]]
        is_repaired = node["state"] == "ready" and node["reason"].startswith("repaired by a reboot of its machine: ")
        return "" if is_repaired else f"it is {node['state']}: {node['reason']}"

    fleet.until(not_repaired, LIMIT_S, "the node is not repaired")
    assert lab(environment, "exec", "n1", "--", "python3", "-S", "-c", BOOT) != first
    events = fleet.ask("GET", "events/?kind=node.rebooted&page_size=500")["results"]
    assert [event["node"] for event in events] == [machine["node"]]
    again = [row for row in fleet.rows("machines") if row["address"] == address]
    assert [(row["id"], row["connected"]) for row in again] == [(machine["id"], True)]
