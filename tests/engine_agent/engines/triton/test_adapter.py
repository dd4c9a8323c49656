"""Triton is started as its plan states, in its own Python; features that it lacks are refused by name."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_agent.engines.base import EngineUnavailable
from engine_agent.engines.registry import check_plan
from engine_agent.engines.triton.adapter import TritonAdapter
from engine_agent.protocol.messages import Artifact, Assignment, EnginePlan, Peer
from tests.engine_agent.engines.contexts import PORT_BASE, context, leader_order, not_plain

PYTHON = "/cache/engines/triton/bin/python"
NODE = context(triton=PYTHON)
PLAN = EnginePlan(
    engine="triton",
    served_model="tiny",
    max_concurrency=2,
    ready_timeout_s=60.0,
    artifact=Artifact("file:///srv/tiny", "sha256:" + "0" * 64),
    args=("--context-length", "2048", "--parallel", "2", "--temperature", "0.2"),
)


def assignment(*peers: Peer, **plan: Any) -> Assignment:
    return leader_order(PLAN, *peers, **plan)


def test_the_launcher_runs_in_the_engines_python_and_gets_weights_ports_and_options() -> None:
    launch = TritonAdapter().launch(assignment(), NODE)
    assert launch.argv == (
        *(PYTHON, "-m", "engine_agent.engines.triton.serve", "--node-id", "n-00000001"),
        *("--model-dir", "/srv/tiny", "--digest", "sha256:" + "0" * 64, "--served-model", "tiny"),
        *("--folder", "/home/node/triton", "--port", str(PORT_BASE + 3), "--server-port", str(PORT_BASE + 4)),
        *("--metrics-port", str(PORT_BASE + 5), "--", *PLAN.args),
    )
    assert (launch.reads, launch.writes) == ((Path("/srv/tiny"),), (Path("/home/node/triton"),))
    assert TritonAdapter().health_url(assignment(), NODE) == f"http://127.0.0.1:{PORT_BASE + 3}/health"


def test_weights_in_a_bucket_are_fetched_first() -> None:
    uri = Artifact("s3://models/tiny", "sha256:" + "0" * 64)
    argv = TritonAdapter().launch(assignment(artifact=uri), NODE).argv
    assert "engine_agent.engines.launch_artifacts" in argv
    assert argv[argv.index("--model-dir") + 1] == "/cache/fetched/" + "0" * 64


@pytest.mark.parametrize(
    ("wrong", "why"),
    not_plain(PLAN),
)
def test_what_it_cannot_do_is_refused_by_name(wrong: Assignment, why: str) -> None:
    with pytest.raises(EngineUnavailable, match=why):
        TritonAdapter().launch(wrong, NODE)


def test_a_node_without_it_says_how_to_install_it() -> None:
    with pytest.raises(EngineUnavailable, match=r"engine_agent\.engines\.triton\.environment install"):
        TritonAdapter().launch(assignment(), context())


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--model-repository", "/x"), "may not be given the option --model-repository"),
        (("--sleep-idle-seconds", "9"), "may not be given the option --sleep-idle-seconds"),
        (("--cache-prompt",), "may not be given the option --cache-prompt"),
        (("--threads", "0"), "--threads is '0'; it must be a whole number from 1 to 512"),
    ],
)
def test_an_agent_checks_every_option_and_its_value_again(args: tuple[str, ...], why: str) -> None:
    check_plan(PLAN)
    with pytest.raises(EngineUnavailable, match=why):
        check_plan(msgspec.structs.replace(PLAN, args=(*PLAN.args, *args)))
