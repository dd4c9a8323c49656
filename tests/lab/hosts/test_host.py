"""Programs that a host starts at boot, and the places of a laboratory's files."""

import subprocess
from pathlib import Path

import pytest

from lab.hosts import fleet, host
from lab.hosts.client import Forward
from lab.hosts.fleet import Ports, read_ports, start_script
from lab.hosts.places import Places
from lab.hosts.topology import NoLaboratory, Role, Topology

CRONTAB = Path(host.__file__).with_name("crontab.sh")


def places(python: str, home: str = "/data/switchyard/.switchyard/lab", uid: int = 0) -> Places:
    return Places(Path(home), Path("/data/cache"), Path(python), None, uid, uid)


def test_executables_and_lines_of_cron_for_the_boot_are_started(tmp_path: Path) -> None:
    for name, mode in (("b.start", 0o755), ("a.start", 0o755), ("c.start", 0o644), ("a.stop", 0o755)):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(mode)
    table = tmp_path / "table"
    table.write_text("0 5 * * * backup\n@reboot serve --fast\n# @reboot no\n")

    assert host.start_at_boot(tmp_path, table) == [
        [str(tmp_path / "a.start")],
        [str(tmp_path / "b.start")],
        ["/bin/sh", "-c", "serve --fast"],
    ]
    assert host.start_at_boot(tmp_path / "none", tmp_path / "nowhere") == []


def test_crontab_keeps_what_it_is_given(tmp_path: Path) -> None:
    script = tmp_path / "crontab"
    script.write_text(CRONTAB.read_text().replace("/var/spool", str(tmp_path)))

    def crontab(argument: str, given: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(["sh", script, argument], input=given, capture_output=True, text=True, check=False)

    assert crontab("-l").returncode == 1
    assert crontab("-", "@reboot serve\n").returncode == 0
    assert crontab("-l").stdout == "@reboot serve\n"
    assert crontab("-e").returncode == 2
    assert crontab("-r").returncode == 0
    assert crontab("-l").returncode == 1


def test_of_the_checkout_only_the_control_plane_sees_something() -> None:
    lab = places("/root/pythons/3.11/bin/python3")

    shown, hidden = lab.views(Role.CONTROL)
    assert "/root/pythons/3.11" in shown
    assert hidden == ()
    shown, hidden = lab.views(Role.NODE)
    assert shown == ("/root/pythons/3.11",)
    assert {"/data/cache", "/data/switchyard/.switchyard/lab"} <= set(hidden)


def test_who_is_not_root_has_a_home_of_his_own() -> None:
    assert places("/usr/bin/python3").user() == ("root", "/root")
    assert places("/usr/bin/python3", uid=4_000_000).user() == ("u4000000", "/home/u4000000")


def test_ports_are_those_of_make_up_and_each_ingress_has_one() -> None:
    assert read_ports({}) == Ports(8000, 8080)
    forwards = Ports(8000, 8080).forwards(Topology(("east", "west"), nodes=1, ingresses=2))
    assert forwards[0] == Forward(8000, "c1", 8000, by_loopback=True)
    assert forwards[1:] == [Forward(8080 + number, f"i{number + 1}", 8080) for number in range(4)]
    with pytest.raises(NoLaboratory, match="SWITCHYARD_PORT is 'http'"):
        read_ports({"SWITCHYARD_PORT": "http"})


def script_of(topology: Topology, name: str) -> str:
    return start_script(topology, topology.host(name), Path("/venv/bin/python"))


def test_one_control_host_is_reached_by_its_address_and_runs_its_own_database() -> None:
    script = script_of(Topology(controls=1), "c1")

    assert "export SWITCHYARD_AGENT_URL=https://10.0.0.1:8443\n" in script
    assert script.endswith("exec '/venv/bin/python' -m controlplane.embedded up\n")
    assert fleet.CONTROL_HOME in script
    assert "DATABASE_URL" not in script


def test_two_control_hosts_share_a_database_and_agents_know_both() -> None:
    topology = Topology(controls=2)
    first, second = script_of(topology, "c1"), script_of(topology, "c2")

    for script in (first, second):
        assert "export SWITCHYARD_AGENT_URL=https://10.0.0.1:8443,https://10.0.0.2:8443\n" in script
        assert "export DATABASE_URL='postgres://switchyard@10.0.0.201:5432/switchyard?sslmode=require" in script
    waits = f"until [ -e {fleet.CONTROL_HOME}/settings.json ]"
    assert (waits in first, waits in second) == (False, True), "c2 waits for the secrets of c1"
