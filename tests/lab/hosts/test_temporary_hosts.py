"""Temporary hosts: reached like any other host, removed completely, and reported when they shut down."""

from collections.abc import Iterator
from ipaddress import IPv4Address
from typing import Any

import pytest

from lab.hosts import client
from lab.hosts.conditions import Conditions, Lost, read_state, write_state
from lab.hosts.file_tree import START_AT_BOOT
from lab.hosts.topology import (
    Host,
    NoLaboratory,
    Role,
    TemporaryHost,
    Topology,
    read_temporary_host,
    write_temporary_host,
)
from tests.lab.hosts.conftest import ASK, ECHO, NOT_REACHED_AFTER_S, ROUND_TRIP_S, WITHIN_S, Lab, eventually

pytestmark = pytest.mark.processes

ADDRESS = "10.1.16.4"
BOOT = "print(open('/proc/1/stat').read().rpartition(')')[2].split()[19])"
"""Prints the part of `engine_agent.node.machine.reboots.this_boot` that differs after a reboot of a container."""
LINK_LOCAL = IPv4Address("169.254.169.254")


def temporary_host(name: str = "v1", site: str = "us-east-1", address: str = ADDRESS, **files: str) -> TemporaryHost:
    """One that answers on port 7000, as all hosts of this laboratory do."""
    host = Host(name, Role.TEMPORARY, site, IPv4Address(address))
    scripts = {f"{START_AT_BOOT}/echo.start": ECHO, **{f"/opt/{name}": text for name, text in files.items()}}
    return TemporaryHost(host, (LINK_LOCAL,), {"CLOUD": "of tests"}, scripts)


@pytest.fixture(autouse=True)
def alone(lab: Lab) -> Iterator[None]:
    """Removes temporary hosts and faults that a test left."""
    yield
    for name in ("v1", "v2"):
        if state(lab, name):
            lab.ask("remove", name=name)
    lab.heal()


def add(lab: Lab, which: TemporaryHost) -> None:
    lab.ask("add", **write_temporary_host(which))
    eventually(lambda: reaches(lab, which.name, str(which.host.address)), "it listens")


def state(lab: Lab, name: str) -> dict[str, Any]:
    """Of a host, as `lab status` has it; empty: there is none."""
    hosts = client.ask(lab.places, "status")["hosts"]
    return next((host for host in hosts if host["name"] == name), {})


def connect(lab: Lab, source: str, address: str, within_s: float) -> float | None:
    """Seconds that a connection took to be made; None: it was not."""
    done = lab.python(source, ASK, address, str(within_s))
    not_connected = ("timed out", "refused", "Network is unreachable")
    assert done.returncode == 0 or any(why in done.stderr for why in not_connected), done.stderr
    return float(done.stdout) if done.returncode == 0 else None


def reaches(lab: Lab, source: str, address: str) -> bool:
    return connect(lab, source, address, NOT_REACHED_AFTER_S) is not None


def test_a_temporary_host_is_a_host_of_its_region_with_files_and_environment(lab: Lab) -> None:
    add(lab, temporary_host(motd="welcome"))

    assert connect(lab, "n1", ADDRESS, WITHIN_S / 2) is not None
    far_s = connect(lab, "n3", ADDRESS, WITHIN_S / 2)
    assert far_s is not None
    assert far_s >= ROUND_TRIP_S
    assert lab.connects_s("v1", "n2")
    assert lab.run("v1", "cat", "/opt/motd").stdout == "welcome"
    assert lab.run("v1", "sh", "-c", "echo $CLOUD").stdout == "of tests\n"
    assert lab.run("n1", "sh", "-c", "echo $CLOUD").stdout == "\n"
    assert (state(lab, "v1")["address"], state(lab, "v1")["role"]) == (ADDRESS, "temporary")


def test_a_link_local_address_is_reached_on_the_temporary_host_alone(lab: Lab) -> None:
    add(lab, temporary_host())

    assert reaches(lab, "v1", str(LINK_LOCAL))
    assert not reaches(lab, "n1", str(LINK_LOCAL))


def test_of_a_removed_temporary_host_its_log_is_left_and_its_address_is_free(lab: Lab) -> None:
    add(lab, temporary_host(secret="of the first"))
    lab.run("v1", "sh", "-c", "echo said > /var/log/said")
    lab.cut("v1")
    lab.cut("n1", "v1", Lost.SENT)
    lab.ask("slow", name="v1", delay_s=1.0, loss=0.0)
    lab.ask("remove", name="v1")
    assert state(lab, "v1") == {}
    assert (lab.places.files_of("v1").with_name("log") / "said").read_text() == "said\n"
    assert not lab.places.files_of("v1").exists()
    assert not reaches(lab, "n1", ADDRESS)

    add(lab, temporary_host("v2"))
    assert reaches(lab, "n1", ADDRESS)
    lab.ask("remove", name="v2")
    add(lab, temporary_host("v1"))
    assert reaches(lab, "n1", ADDRESS)
    assert state(lab, "v1")["wrong"] == []
    assert lab.run("v1", "cat", "/opt/secret").returncode != 0
    assert lab.run("v1", "cat", "/var/log/said").returncode != 0


def test_a_temporary_host_that_shuts_down_is_another_thing_than_one_without_power(lab: Lab) -> None:
    add(lab, temporary_host())
    lab.ask("power-off", name="v1")
    assert (state(lab, "v1")["power"], state(lab, "v1")["shut_down"]) == (False, False)
    lab.ask("boot", name="v1")
    eventually(lambda: reaches(lab, "v1", str(LINK_LOCAL)), "it listens again, there too")

    # A child in a separate session is killed with all others.
    lab.run("v1", "sh", "-c", "setsid -f sh -c 'shutdown -h now; sleep 1000' > /dev/null 2>&1")
    eventually(lambda: not state(lab, "v1")["power"], "it has ended")
    assert state(lab, "v1")["shut_down"]
    assert "shut down" in lab.do("status")
    assert not reaches(lab, "n1", ADDRESS)

    lab.ask("boot", name="v1")
    assert (state(lab, "v1")["power"], state(lab, "v1")["shut_down"]) == (True, False)
    assert lab.run("v1", "shutdown", "-c", "now").returncode != 0


def test_a_host_that_reboots_comes_back_as_another_boot_with_its_files(lab: Lab) -> None:
    add(lab, temporary_host())
    before = lab.python("v1", BOOT).stdout
    lab.run("v1", "sh", "-c", "echo kept > /var/lib/kept; setsid -f shutdown -r now > /dev/null 2>&1")
    eventually(lambda: lab.python("v1", BOOT).stdout not in ("", before), "it has booted again")
    eventually(lambda: reaches(lab, "v1", str(LINK_LOCAL)), "it listens again")
    assert not state(lab, "v1")["shut_down"]
    assert lab.run("v1", "cat", "/var/lib/kept").stdout == "kept\n"


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        (temporary_host("n1"), "a name that is not in use"),
        (temporary_host("i-0123456789abcdef0"), "at most 15 letters"),
        (temporary_host("core"), "a name that is not in use"),
        (temporary_host(site="moon"), "give a region and one of its addresses"),
        (temporary_host(site="outside", address="10.3.0.9"), "give a region and one of its addresses"),
        (temporary_host(address="10.2.16.4"), "give a region and one of its addresses"),
        (temporary_host(address="10.1.0.1"), "n1 has it"),
        (temporary_host(address="10.1.0.254"), "the router has it"),
        (TemporaryHost(temporary_host().host, files={"/usr/bin/own": ""}), "no file of a host's own"),
        (TemporaryHost(temporary_host().host, files={"/etc/../own": ""}), "no file of a host's own"),
    ],
)
def test_a_temporary_host_that_cannot_be_is_refused_and_nothing_of_it_is_there(
    lab: Lab, wanted: TemporaryHost, complaint: str
) -> None:
    before = client.ask(lab.places, "status")["hosts"]
    with pytest.raises(NoLaboratory, match=complaint):
        client.ask(lab.places, "add", **write_temporary_host(wanted))
    names = [host["name"] for host in client.ask(lab.places, "status")["hosts"]]
    assert names == [host["name"] for host in before]


def test_only_temporary_hosts_are_removed(lab: Lab) -> None:
    for name in ("n1", "v9"):
        with pytest.raises(NoLaboratory, match=f"{name} is not a temporary host"):
            client.ask(lab.places, "remove", name=name)


def test_what_is_said_of_a_temporary_host_is_understood() -> None:
    assert read_temporary_host(write_temporary_host(temporary_host(motd="welcome"))) == temporary_host(motd="welcome")
    for wrong in ({"address": "10.1"}, {"link_local": ["10.1.0.9"]}):
        with pytest.raises(NoLaboratory, match="v1: "):
            read_temporary_host({**write_temporary_host(temporary_host()), **wrong})


def test_temporary_hosts_are_part_of_what_routers_and_relay_are_told() -> None:
    topology = Topology().with_temporary_host(temporary_host().host)
    assert read_state(write_state(topology, Conditions()))[0] == topology
    assert topology.without_temporary_host("v1") == Topology()
