"""The local provider boots real processes, tells what runs from what is dead, and leaves nothing."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from engine_agent.protocol.ports import PORTS_PER_NODE
from engine_agent.protocol.states import AgentKind
from fleet.planning.placement.distance import shared_prefix
from fleet.planning.snapshot import ProviderStatus
from fleet.providers.base import LaunchSpec, ProviderError
from fleet.providers.local import LocalProvider

CHECKOUT = Path(__file__).resolve().parents[3]
FIRST_PORT = 27000
DEADLINE_S = 15.0


@pytest.fixture
def provider(tmp_path: Path) -> Iterator[LocalProvider]:
    made = LocalProvider(home=tmp_path, checkout=CHECKOUT, server_url="http://127.0.0.1:9", first_port=FIRST_PORT)
    yield made
    made.terminate_all()


def launch(provider: LocalProvider, node: str = "n-00000001") -> None:
    provider.launch(
        LaunchSpec(
            id=node,
            kind=AgentKind.NODE,
            region="us-east-1",
            address="127.0.0.1",
            port=provider.free_ports([]),
            join_token="sw_00000000_token",
            instance_type="local.cpu",
            topology=("a", "b"),
        )
    )


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def agents(node: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if node in (p.info["cmdline"] or [])]


def test_a_launched_machine_runs_and_a_terminated_one_is_gone(provider: LocalProvider) -> None:
    launch(provider)
    assert provider.describe(["n-00000001", "n-unknown"]) == {
        "n-00000001": ProviderStatus.RUNNING,
        "n-unknown": ProviderStatus.GONE,
    }
    provider.terminate("n-00000001")
    assert provider.describe(["n-00000001"]) == {"n-00000001": ProviderStatus.GONE}
    assert agents("n-00000001") == []


def test_a_killed_machine_is_gone_and_its_agent_can_be_started_again(provider: LocalProvider) -> None:
    launch(provider)
    (agent,) = agents("n-00000001")
    agent.kill()
    eventually(lambda: provider.describe(["n-00000001"])["n-00000001"] is ProviderStatus.GONE)
    provider.restart_agent("n-00000001")
    assert provider.describe(["n-00000001"])["n-00000001"] is ProviderStatus.RUNNING


def test_a_machine_is_told_the_form_of_logs_and_where_traces_go_but_not_our_name(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"SWITCHYARD_LOG_FORMAT": "json", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    for name, text in {**given, "OTEL_SERVICE_NAME": "web", "DATABASE_URL": "postgres://secret"}.items():
        monkeypatch.setenv(name, text)
    launch(provider)
    (agent,) = agents("n-00000001")
    environment = agent.environ()
    assert given.items() <= environment.items()
    assert not {"OTEL_SERVICE_NAME", "DATABASE_URL"} & environment.keys()


def test_an_agent_that_is_started_again_looks_for_todays_server(provider: LocalProvider) -> None:
    launch(provider)
    (agent,) = agents("n-00000001")
    agent.kill()
    eventually(lambda: agents("n-00000001") == [])
    moved = LocalProvider(
        home=provider.home, checkout=CHECKOUT, server_url="http://127.0.0.1:10", first_port=FIRST_PORT
    )
    moved.restart_agent("n-00000001")
    (again,) = agents("n-00000001")
    given = again.cmdline()
    assert given[given.index("--server") + 1] == moved.server_url


@pytest.mark.parametrize(
    ("module", "expected"),
    [("engine_agent.engines.sim", ProviderStatus.AGENT_DEAD), ("engine_agent.proxy", ProviderStatus.GONE)],
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
    assert provider.describe(["n-00000001"])["n-00000001"] is ProviderStatus.RUNNING


def test_an_ended_machine_keeps_its_logs_and_nothing_else(provider: LocalProvider) -> None:
    launch(provider)
    home = provider.home / "nodes" / "n-00000001"
    eventually(lambda: (home / "agent.log").stat().st_size > 0)
    provider.terminate("n-00000001")
    assert {path.suffix for path in home.iterdir()} == {".log"}
    with pytest.raises(ProviderError, match="n-00000001"):
        provider.restart_agent("n-00000001")


def test_port_blocks_that_are_taken_are_passed_over(provider: LocalProvider) -> None:
    assert provider.free_ports([FIRST_PORT]) == FIRST_PORT + PORTS_PER_NODE


def test_neighbours_share_a_network_node(provider: LocalProvider) -> None:
    first, same_rack, other_hall, same_row = (provider.topology("us-east-1", position) for position in (0, 3, 4, 8))
    assert first == same_rack
    assert [shared_prefix(first, other) for other in (other_hall, same_row)] == [0, 2]
