"""The simulator's command line on every rank."""

import sys

import pytest
from msgspec import structs

from engine_agent.engines.base import EngineUnavailable
from engine_agent.engines.openai_http import Endpoint
from engine_agent.engines.sim.adapter import SimAdapter
from engine_agent.engines.sim.settings import parse_settings
from engine_agent.protocol.messages import EnginePlan, PlanAdapter
from engine_agent.protocol.ports import ENGINE, ENGINE_ADMIN, KV_TRANSFER, rendezvous_port
from engine_agent.protocol.states import CellRole
from tests.engine_agent.engines.contexts import PORT_BASE, context, peer
from tests.engine_agent.orders import assignment

PLAN = EnginePlan(
    "sim", "sim-70b", max_concurrency=8, ready_timeout_s=60.0, args=("--seed", "7"), env={"A": "1", "PYTHONPATH": "/x"}
)
PAIR = (peer(0), peer(1))


def option(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_a_leader_listens_for_its_followers() -> None:
    argv = SimAdapter().launch(assignment(generation=3, peers=PAIR, plan=PLAN), context()).argv
    assert argv[:3] == (sys.executable, "-m", "engine_agent.engines.sim")
    assert option(argv, "--leader") == f"127.0.0.1:{rendezvous_port(PORT_BASE, 3)}"
    assert option(argv, "--followers") == "1"
    assert option(argv, "--port") == str(PORT_BASE + ENGINE)
    assert option(argv, "--admin-port") == str(PORT_BASE + ENGINE_ADMIN)
    assert argv[-2:] == ("--seed", "7")


def test_adapters_are_named_before_the_plans_own_arguments() -> None:
    plan = structs.replace(PLAN, adapters=(PlanAdapter("acme/tuned"), PlanAdapter("acme/other")))
    argv = SimAdapter().launch(assignment(plan=plan), context()).argv
    assert argv[-6:] == ("--adapter", "acme/tuned", "--adapter", "acme/other", "--seed", "7")
    assert parse_settings(argv[3:], {}).adapters == ("acme/tuned", "acme/other")


def test_a_follower_goes_to_its_leader() -> None:
    argv = SimAdapter().launch(assignment(generation=3, rank=1, peers=PAIR, plan=PLAN), context()).argv
    assert option(argv, "--role") == "follower"
    assert option(argv, "--rank") == "1"
    assert option(argv, "--leader") == f"10.0.0.1:{rendezvous_port(PORT_BASE, 3)}"
    assert option(argv, "--followers") == "1"


def test_a_follower_without_a_leader_is_refused() -> None:
    with pytest.raises(EngineUnavailable, match="no peer of rank 0"):
        SimAdapter().launch(assignment(rank=1, peers=(peer(1),), plan=PLAN), context())


def test_the_node_and_its_secret_win_over_the_plans_environment() -> None:
    given = assignment(plan=PLAN)
    env = SimAdapter().launch(given, context()).env
    assert env == {
        "A": "1",
        "PYTHONPATH": "/code",
        "SWITCHYARD_NODE_ID": "n-00000001",
        "SWITCHYARD_CELL_SECRET": given.secret,
    }


def test_the_secret_is_not_in_the_command_line() -> None:
    given = assignment(plan=PLAN)
    assert given.secret not in SimAdapter().launch(given, context()).argv


def test_a_follower_answers_for_its_health_on_the_administration_port() -> None:
    adapter = SimAdapter()
    assert adapter.health_url(assignment(peers=PAIR), context()) == f"http://127.0.0.1:{PORT_BASE + ENGINE}/health"
    follower = assignment(rank=1, peers=PAIR)
    assert adapter.health_url(follower, context()) == f"http://127.0.0.1:{PORT_BASE + ENGINE_ADMIN}/health"


def test_a_role_comes_before_the_plans_own_arguments() -> None:
    given = structs.replace(assignment(plan=PLAN), cell_role=CellRole.PREFILL, kv_layout="a")
    settings = parse_settings(SimAdapter().launch(given, context()).argv[3:], {})
    assert settings.handover.role is CellRole.PREFILL
    assert settings.kv_endpoint == Endpoint("127.0.0.1", PORT_BASE + KV_TRANSFER)
    given = structs.replace(given, cell_role=CellRole.DECODE)
    settings = parse_settings(SimAdapter().launch(given, context()).argv[3:], {})
    assert (settings.handover.role, settings.kv_endpoint) == (CellRole.DECODE, None)
