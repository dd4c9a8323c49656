"""vLLM's command line, and when there is none."""

from dataclasses import dataclass

import pytest

from engine_agent.engines.base import EngineUnavailable
from engine_agent.engines.vllm.adapter import VllmAdapter
from engine_agent.engines.vllm.serve import parse
from engine_agent.protocol.messages import Artifact, EnginePlan
from engine_agent.protocol.ports import ENGINE
from tests.engine_agent.engines.contexts import PORT_BASE, context, peer
from tests.engine_agent.orders import assignment

ARTIFACT = Artifact("file:///cache/the%20model-12", "sha256:12")
NODE = context(vllm="/engines/bin/python")


@dataclass(frozen=True)
class Refusal:
    artifact: Artifact | None
    reason: str


def plan(artifact: Artifact | None) -> EnginePlan:
    return EnginePlan(
        "vllm",
        "smollm2",
        max_concurrency=16,
        ready_timeout_s=60.0,
        artifact=artifact,
        args=("--max-model-len", "2048"),
        env={"OMP_NUM_THREADS": "1"},
    )


def test_the_launcher_understands_what_the_adapter_says() -> None:
    launch = VllmAdapter().launch(assignment(plan=plan(ARTIFACT)), NODE)
    assert launch.argv[:3] == ("/engines/bin/python", "-m", "engine_agent.engines.vllm.serve")
    options = parse(launch.argv[3:])
    assert options.node_id == "n-00000001"
    assert options.port == PORT_BASE + ENGINE
    assert options.served_model == "smollm2"
    assert str(options.model_dir) == "/cache/the model-12"
    assert options.digest == "sha256:12"
    assert options.vllm_args == ("--max-model-len", "2048")


def test_the_environment_is_the_plans_and_the_nodes() -> None:
    env = VllmAdapter().launch(assignment(plan=plan(ARTIFACT)), NODE).env
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["PYTHONPATH"] == "/code"
    assert env["SWITCHYARD_NODE_ID"] == "n-00000001"


@pytest.mark.parametrize(
    "refusal",
    [
        Refusal(None, "names no artifact"),
        Refusal(Artifact("s3://bucket/model", "sha256:12"), "s3://bucket/model is not on this node"),
        Refusal(Artifact("file://elsewhere/model", "sha256:12"), "is not on this node"),
        Refusal(Artifact("file:model", "sha256:12"), "is not on this node"),
    ],
    ids=lambda refusal: refusal.reason,
)
def test_only_an_artifact_on_this_node_can_be_served(refusal: Refusal) -> None:
    with pytest.raises(EngineUnavailable, match=refusal.reason):
        VllmAdapter().launch(assignment(plan=plan(refusal.artifact)), NODE)


def test_a_node_without_vllm_says_how_to_install_it() -> None:
    with pytest.raises(EngineUnavailable, match=r"engine_agent\.engines\.vllm\.environment install"):
        VllmAdapter().launch(assignment(plan=plan(ARTIFACT)), context())


def test_a_cell_of_several_nodes_is_refused() -> None:
    with pytest.raises(EngineUnavailable, match="several nodes"):
        VllmAdapter().launch(assignment(plan=plan(ARTIFACT), peers=(peer(0), peer(1))), NODE)


def test_health_is_asked_of_the_engine_itself() -> None:
    assert VllmAdapter().health_url(assignment(), NODE) == f"http://127.0.0.1:{PORT_BASE + ENGINE}/health"
