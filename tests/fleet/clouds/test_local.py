"""The local provider boots real processes, reports which run, and leaves none behind."""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from engine_agent.protocol.machine_messages import RELEASE_FILE
from engine_agent.protocol.ports import PORTS_PER_NODE
from engine_agent.protocol.states import AgentKind
from fleet.clouds.base import LaunchSpec, Machine, NoCapacity, ProviderError
from fleet.clouds.local import Boot, LocalProvider, place
from fleet.clouds.local_processes import agent_of, code_of, processes_by_node
from fleet.placement.planning.distance import shared_prefix
from fleet.reconcile.planning.snapshot import ProviderStatus
from fleet.releases.services.archive import release_folder, source_keep

pytestmark = pytest.mark.processes

CHECKOUT = Path(__file__).resolve().parents[3]
FIRST_PORT = 30000
"""Used by no other test: the provider skips used ports."""
DEADLINE_S = 60.0


@pytest.fixture
def provider(tmp_path: Path) -> Iterator[LocalProvider]:
    made = LocalProvider(home=tmp_path, checkout=CHECKOUT, server_url="http://127.0.0.1:9", first_port=FIRST_PORT)
    yield made
    made.terminate_all()


def launch(provider: LocalProvider, node: str = "n-00000001", **changes: Any) -> Machine:
    spec = LaunchSpec(id=node, kind=AgentKind.NODE, region="us-east-1", join_token="sw_00000000000000_token")
    return provider.launch([replace(spec, instance_type="local.cpu", **changes)])[0]


@pytest.fixture
def booted(provider: LocalProvider, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Command lines of agents; none is started."""
    commands: list[list[str]] = []
    monkeypatch.setattr("fleet.clouds.local.spawn_detached", lambda argv, *_: commands.append(argv))
    return commands


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def agents(node: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if node in (p.info["cmdline"] or [])]


def the_agent(node: str = "n-00000001") -> psutil.Process:
    """The only one, once its process has executed the agent."""
    eventually(lambda: len(agents(node)) == 1)
    return agents(node)[0]


def runs(provider: LocalProvider) -> bool:
    return provider.describe(["n-00000001"])["n-00000001"] is ProviderStatus.RUNNING


def test_a_launched_machine_runs_and_a_terminated_one_is_gone(provider: LocalProvider) -> None:
    launch(provider)
    eventually(lambda: runs(provider))
    assert provider.describe(["n-00000001", "n-unknown"]) == {
        "n-00000001": ProviderStatus.RUNNING,
        "n-unknown": ProviderStatus.GONE,
    }
    provider.terminate("n-00000001")
    assert provider.describe(["n-00000001"]) == {"n-00000001": ProviderStatus.GONE}
    assert agents("n-00000001") == []


def test_a_killed_machine_is_gone_and_its_agent_can_be_started_again(provider: LocalProvider) -> None:
    launch(provider)
    agent = the_agent()
    agent.kill()
    eventually(lambda: provider.describe(["n-00000001"])["n-00000001"] is ProviderStatus.GONE)
    provider.restart_agent("n-00000001")
    eventually(lambda: runs(provider))


def test_a_rebooted_machine_runs_again_with_other_processes(provider: LocalProvider) -> None:
    launch(provider)
    before = the_agent()
    provider.reboot("n-00000001")
    assert not before.is_running()
    assert the_agent().pid != before.pid
    eventually(lambda: runs(provider))
    with pytest.raises(ProviderError, match="cannot reboot n-00000002: its folder has no"):
        provider.reboot("n-00000002")


def test_a_machine_is_told_the_form_of_logs_and_where_traces_go_but_not_our_name(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"SWITCHYARD_LOG_FORMAT": "json", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    for name, text in {**given, "OTEL_SERVICE_NAME": "web", "DATABASE_URL": "postgres://secret"}.items():
        monkeypatch.setenv(name, text)
    launch(provider)
    agent = the_agent()
    environment = agent.environ()
    assert given.items() <= environment.items()
    assert not {"OTEL_SERVICE_NAME", "DATABASE_URL"} & environment.keys()


def test_an_agent_that_is_started_again_looks_for_todays_server(provider: LocalProvider) -> None:
    launch(provider)
    agent = the_agent()
    agent.kill()
    eventually(lambda: agents("n-00000001") == [])
    moved = LocalProvider(
        home=provider.home, checkout=CHECKOUT, server_url="http://127.0.0.1:10", first_port=FIRST_PORT
    )
    moved.restart_agent("n-00000001")
    again = the_agent()
    given = again.cmdline()
    assert given[given.index("--server") + 1] == moved.server_url


@pytest.mark.parametrize(
    ("module", "expected"),
    [("engine_agent.engines.sim", ProviderStatus.AGENT_DEAD), ("engine_agent.cell_proxy", ProviderStatus.GONE)],
)
def test_an_engine_alone_is_a_machine_without_agent_but_a_proxy_alone_is_nothing(
    provider: LocalProvider, module: str, expected: ProviderStatus
) -> None:
    environment = {"SWITCHYARD_NODE_ID": "n-00000002", "SWITCHYARD_HOME": str(provider.home)}
    program = [sys.executable, "-c", "import signal; signal.pause()", module]
    process = subprocess.Popen(program, env=environment)
    try:
        eventually(lambda: provider.describe(["n-00000002"])["n-00000002"] is expected)
    finally:
        process.kill()
        process.wait()


def test_machines_of_another_home_are_not_ours(provider: LocalProvider, tmp_path: Path) -> None:
    launch(provider)
    other = LocalProvider(
        home=tmp_path / "other", checkout=CHECKOUT, server_url=provider.server_url, first_port=FIRST_PORT
    )
    assert other.describe(["n-00000001"])["n-00000001"] is ProviderStatus.GONE
    assert other.terminate_all() == 0
    eventually(lambda: runs(provider))


def test_an_ended_machine_keeps_its_logs_and_nothing_else(provider: LocalProvider) -> None:
    launch(provider)
    home = provider.home / "nodes" / "n-00000001"
    eventually(lambda: (home / "agent.log").stat().st_size > 0)
    provider.terminate("n-00000001")
    assert {path.suffix for path in home.iterdir()} == {".log"}
    with pytest.raises(ProviderError, match="n-00000001"):
        provider.restart_agent("n-00000001")


def test_every_machine_has_ports_of_its_own_and_those_of_a_terminated_one_are_free_again(
    provider: LocalProvider, booted: list[list[str]]
) -> None:
    machines = [launch(provider, f"n-{number}") for number in range(3)]
    assert {machine.address for machine in machines} == {"127.0.0.1"}
    assert [machine.port_base for machine in machines] == [FIRST_PORT + 20 * number for number in range(3)]
    provider.terminate("n-1")
    assert launch(provider, "n-3").port_base == FIRST_PORT + PORTS_PER_NODE


def test_ports_that_something_listens_in_are_passed_over(provider: LocalProvider, booted: list[list[str]]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", FIRST_PORT + 3))
        other.listen()
        assert launch(provider).port_base == FIRST_PORT + PORTS_PER_NODE


def test_two_workers_that_launch_at_once_choose_different_ports(
    provider: LocalProvider, booted: list[list[str]]
) -> None:
    with ThreadPoolExecutor(8) as workers:
        machines = list(workers.map(lambda number: launch(provider, f"n-{number}"), range(8)))
    assert len({machine.port_base for machine in machines}) == 8


def test_without_any_free_ports_the_launch_names_the_setting(
    provider: LocalProvider, booted: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet.clouds.local.MAX_BLOCKS", 1)
    launch(provider)
    with pytest.raises(ProviderError, match="set SWITCHYARD_NODE_PORTS"):
        launch(provider, "n-2")


def test_nodes_get_no_port_of_an_ingress_and_an_ingress_none_of_a_node(
    provider: LocalProvider, booted: list[list[str]]
) -> None:
    def ingress(number: int, port: int) -> Machine:
        spec = LaunchSpec(f"i-{number}", AgentKind.INGRESS, "eu", "token", address="127.0.0.1", port=port)
        return provider.launch([spec])[0]

    ingress(1, FIRST_PORT - 2000)
    provider.reserved = frozenset([FIRST_PORT + PORTS_PER_NODE])
    assert launch(provider).port_base == FIRST_PORT + 2 * PORTS_PER_NODE
    with pytest.raises(ProviderError, match=f"Port {FIRST_PORT + 45} is for metrics of i-2 and for node n-00000001"):
        ingress(2, FIRST_PORT + 45 - 1000)


def test_a_repeated_launch_is_the_same_machine_and_boots_it_only_if_it_is_gone(provider: LocalProvider) -> None:
    machine = launch(provider)
    agent = the_agent()
    assert launch(provider) == machine
    assert agents("n-00000001") == [agent]
    agent.kill()
    eventually(lambda: agents("n-00000001") == [])
    assert launch(provider) == machine
    assert the_agent() != agent


def test_an_ingress_listens_where_it_was_told_to(provider: LocalProvider, booted: list[list[str]]) -> None:
    spec = LaunchSpec("i-eu", AgentKind.INGRESS, "eu", "token", address="127.0.0.1", port=8080)
    assert provider.launch([spec])[0].port_base == 8080
    assert booted[0][booted[0].index("--port") + 1] == "8080"


def test_a_machine_stands_near_those_that_it_shall_join_and_in_no_place_that_is_taken(
    provider: LocalProvider, booted: list[list[str]]
) -> None:
    first = [launch(provider, f"n-{number}").topology for number in range(5)]
    assert first == [place("us-east-1", number) for number in range(5)]
    near = launch(provider, "n-near", near=place("us-east-1", 4)).topology
    assert near == place("us-east-1", 4)
    assert launch(provider, "n-other", region="eu").topology == place("eu", 0)


def test_machines_that_are_launched_together_stand_as_near_to_the_first_as_there_is_room(
    provider: LocalProvider, booted: list[list[str]]
) -> None:
    for number in range(3):
        launch(provider, f"n-{number}")
    spec = LaunchSpec("n-a", AgentKind.NODE, "us-east-1", "token", instance_type="local.cpu")
    unit = [spec, replace(spec, id="n-b"), replace(spec, id="n-c")]
    places = [machine.topology for machine in provider.launch(unit)]
    assert places == [place("us-east-1", 3), place("us-east-1", 8), place("us-east-1", 8)], "4 is in another hall"
    assert [launch(provider, spec.id).topology for spec in unit] == places, "said again, each stays where it is"


def test_a_unit_for_which_there_are_too_few_ports_waits_and_is_completed_by_the_next_call(
    provider: LocalProvider, booted: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = LaunchSpec("n-a", AgentKind.NODE, "us-east-1", "token", instance_type="local.cpu")
    unit = [spec, replace(spec, id="n-b")]
    with monkeypatch.context() as small:
        small.setattr("fleet.clouds.local.MAX_BLOCKS", 1)
        with pytest.raises(NoCapacity, match=r"no free block of 20 ports from .*; set SWITCHYARD_NODE_PORTS"):
            provider.launch(unit)
    first, second = provider.launch(unit)
    assert (first.port_base, second.port_base) == (FIRST_PORT, FIRST_PORT + PORTS_PER_NODE)


def test_neighbours_share_a_network_node() -> None:
    first, same_rack, other_hall, same_row = (place("us-east-1", position) for position in (0, 3, 4, 8))
    assert first == same_rack
    assert [shared_prefix(first, other) for other in (other_hall, same_row)] == [0, 2]


@pytest.fixture
def releases(provider: LocalProvider, settings: Any) -> tuple[str, str]:
    """Our release, and a second one of the same source."""
    settings.SWITCHYARD_HOME = provider.home
    own = source_keep(CHECKOUT)
    other = msgspec.structs.replace(own, id="f" * 16)
    shutil.copytree(release_folder(own.id), release_folder(other.id))
    (release_folder(other.id) / RELEASE_FILE).write_bytes(msgspec.json.encode(other))
    return own.id, other.id


def await_agent(provider: LocalProvider) -> None:
    """Waits until the started process has become the agent."""
    eventually(lambda: agent_of(processes_by_node(provider.home).get("n-00000001", [])) is not None)


def code(provider: LocalProvider) -> str:
    await_agent(provider)
    agent = the_agent()
    return Path(code_of(agent)).name


def test_an_agent_goes_to_another_release_and_back_and_stays_there(
    provider: LocalProvider, releases: tuple[str, str]
) -> None:
    own, other = releases
    launch(provider, release=own)
    assert code(provider) == own
    for release in (other, own):
        before = the_agent()
        assert provider.move_agents({"n-00000001": release}) == {}
        assert not before.is_running()
        assert code(provider) == release
        moved = the_agent()
        assert provider.move_agents({"n-00000001": release}) == {}
        assert moved.is_running()
    agent = the_agent()
    agent.kill()
    eventually(lambda: agents("n-00000001") == [])
    provider.restart_agent("n-00000001")
    assert code(provider) == own


def test_a_mover_that_died_in_between_is_made_good(provider: LocalProvider, releases: tuple[str, str]) -> None:
    """After the order is written: before the agent was killed, and before the next one was started."""
    own, other = releases
    launch(provider, release=own)
    await_agent(provider)
    boot = provider._boot_of("n-00000001")
    assert boot is not None
    provider._write_boot(Boot(boot.id, boot.argv, other))
    provider.move_agents({"n-00000001": other})
    assert code(provider) == other
    agent = the_agent()
    agent.kill()
    eventually(lambda: agents("n-00000001") == [])
    provider.move_agents({"n-00000001": other})
    assert agents("n-00000001") == []  # the restart uses the ordered release
    provider.restart_agent("n-00000001")
    assert code(provider) == other


def test_a_spare_is_not_taken_for_gone_between_two_agents(
    provider: LocalProvider, releases: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = releases
    launch(provider, release=own)
    await_agent(provider)
    spawn = provider._spawn_agent
    seen = []

    def between(*arguments: Any) -> None:
        seen.append((agents("n-00000001"), provider.describe(["n-00000001"])["n-00000001"]))
        spawn(*arguments)

    monkeypatch.setattr(provider, "_spawn_agent", between)
    provider.move_agents({"n-00000001": other})
    assert seen == [([], ProviderStatus.RUNNING)]
    monkeypatch.setattr("fleet.clouds.local.MOVED_WITHIN_S", 0.0)
    agent = the_agent()
    agent.kill()
    eventually(lambda: provider.describe(["n-00000001"])["n-00000001"] is ProviderStatus.GONE)


def test_who_cannot_be_moved_is_named_and_stays(provider: LocalProvider, releases: tuple[str, str]) -> None:
    own, _ = releases
    launch(provider, release=own)
    troubles = provider.move_agents({"n-00000001": "e" * 16, "n-00000009": own})
    assert f"release {'e' * 16} is not on this host" in troubles["n-00000001"]
    assert "n-00000009 was not launched here" in troubles["n-00000009"]
    assert code(provider) == own
