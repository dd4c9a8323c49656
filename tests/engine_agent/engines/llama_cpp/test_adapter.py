"""llama.cpp is started as its plan states, in its own Python; features that it lacks are refused by name."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_agent.engines.base import EngineUnavailable
from engine_agent.engines.llama_cpp.adapter import LlamaCppAdapter
from engine_agent.engines.registry import check_plan
from engine_agent.node.launch import proxy_launch
from engine_agent.protocol.messages import Artifact, Assignment, EnginePlan, Peer
from tests.engine_agent.engines.contexts import PORT_BASE, context, leader_order, not_plain

PYTHON = "/cache/engines/llama-cpp/bin/python"
NODE = context(**{"llama-cpp": PYTHON})
PLAN = EnginePlan(
    engine="llama-cpp",
    served_model="tiny",
    max_concurrency=2,
    ready_timeout_s=60.0,
    artifact=Artifact("file:///srv/tiny", "sha256:" + "0" * 64),
    args=("--context-length", "2048", "--parallel", "2", "--sleep-idle-seconds", "600"),
)


def assignment(*peers: Peer, **plan: Any) -> Assignment:
    return leader_order(PLAN, *peers, **plan)


def test_the_launcher_runs_in_the_engines_python_and_gets_weights_port_and_options() -> None:
    launch = LlamaCppAdapter().launch(assignment(), NODE)
    assert launch.argv == (
        *(PYTHON, "-m", "engine_agent.engines.llama_cpp.serve", "--node-id", "n-00000001"),
        *("--model-dir", "/srv/tiny", "--digest", "sha256:" + "0" * 64, "--served-model", "tiny"),
        *("--port", str(PORT_BASE + 3), "--", *PLAN.args),
    )
    assert launch.reads == (Path("/srv/tiny"),)
    assert LlamaCppAdapter().health_url(assignment(), NODE) == f"http://127.0.0.1:{PORT_BASE + 3}/health"


def test_weights_in_a_bucket_are_fetched_first() -> None:
    uri = Artifact("s3://models/tiny", "sha256:" + "0" * 64)
    argv = LlamaCppAdapter().launch(assignment(artifact=uri), NODE).argv
    assert "engine_agent.engines.launch_artifacts" in argv
    assert argv[argv.index("--model-dir") + 1] == "/cache/fetched/" + "0" * 64


@pytest.mark.parametrize(
    ("wrong", "why"),
    not_plain(PLAN),
)
def test_what_it_cannot_do_is_refused_by_name(wrong: Assignment, why: str) -> None:
    with pytest.raises(EngineUnavailable, match=why):
        LlamaCppAdapter().launch(wrong, NODE)


def test_a_node_without_it_says_how_to_install_it() -> None:
    with pytest.raises(EngineUnavailable, match=r"engine_agent\.engines\.llama_cpp\.environment install"):
        LlamaCppAdapter().launch(assignment(), context())


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--host", "10.0.0.1"), "--host, which the agent sets itself"),
        (("--mmproj", "/x"), "may not be given the option --mmproj"),
        (("--threads", "0"), "--threads is '0'; it must be a whole number from 1 to 512"),
        (("--threads", "1e999"), "from 1 to 512"),
        (("--threads", "2.5"), "must be a whole number"),
        (("--threads",), "--threads is None; it must be a whole number"),
        (("--cache-type-k", "q9"), "it must be one of bf16, f16"),
        (("--kv-unified", "x"), "it must be true or false"),
        (("--temperature", "nan"), "it must be a number from 0 to 10"),
    ],
)
def test_an_agent_checks_every_option_and_its_value_again(args: tuple[str, ...], why: str) -> None:
    check_plan(PLAN)
    with pytest.raises(EngineUnavailable, match=why):
        check_plan(msgspec.structs.replace(PLAN, args=(*PLAN.args, *args)))


@pytest.mark.parametrize(("args", "cached"), [(PLAN.args, False), ((*PLAN.args, "--cache-prompt"), True)])
def test_clients_cannot_choose_what_concerns_others(args: tuple[str, ...], cached: bool) -> None:
    argv = proxy_launch(assignment(args=args), NODE).argv
    members = msgspec.json.decode(argv[argv.index("--engine-members") + 1])
    assert members["fixed"] == {"cache_prompt": cached, "id_slot": -1, "lora": [], "response_fields": []}
    assert {"grammar", "structured_outputs"} <= set(members["refused"])
    assert members["schema_paths"] == ["/v1/chat/completions"]
    assert members["sequences"] == 1


@pytest.mark.parametrize(("args", "sleeps"), [(PLAN.args, True), (PLAN.args[:4], False)])
def test_the_cell_proxy_lets_an_engine_sleep_that_shall(args: tuple[str, ...], sleeps: bool) -> None:
    assert ("--sleeps" in proxy_launch(assignment(args=args), NODE).argv) is sleeps
