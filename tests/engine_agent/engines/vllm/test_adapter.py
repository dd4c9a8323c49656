"""vLLM's command line, and when there is none."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec import structs

from engine_agent.engines.base import EngineUnavailable
from engine_agent.engines.vllm.adapter import VllmAdapter
from engine_agent.engines.vllm.options import parse
from engine_agent.protocol.messages import Artifact, EnginePlan, PlanAdapter
from engine_agent.protocol.ports import ENGINE, ENGINE_ADMIN, KV_TRANSFER, rendezvous_port
from engine_agent.protocol.states import CellRole, MemberRole
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


FOLLOWER = assignment(plan=plan(ARTIFACT), generation=2, rank=1, peers=(peer(0), peer(1)))


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


def test_adapters_are_fetched_and_told_to_the_launcher_with_where_they_lie() -> None:
    far = Artifact("s3://bucket/tuned", f"sha256:{'7' * 64}")
    adapters = (PlanAdapter("acme/tuned", far), PlanAdapter("near", Artifact("file:///cache/near", "sha256:34")))
    given = assignment(plan=structs.replace(plan(Artifact("file:///cache/model", "sha256:12")), adapters=adapters))
    launch = VllmAdapter().launch(given, NODE)
    own, _, engine = " ".join(launch.argv).partition(" -- ")
    assert own.endswith(f"--fetch s3://bucket/tuned sha256:{'7' * 64}")
    options = parse(engine.split()[3:])
    assert [(name, digest) for name, _, digest in options.adapters] == [
        ("acme/tuned", f"sha256:{'7' * 64}"),
        ("near", "sha256:34"),
    ]
    assert options.adapters[0][1].startswith(str(NODE.cache))
    assert options.adapters[1][1] == "/cache/near"
    assert [str(path) for path in launch.reads] == ["/cache/model", "/cache/near"]


def test_a_store_of_kv_blocks_is_a_folder_of_the_machine_that_the_engine_may_write() -> None:
    stores = structs.replace(plan(ARTIFACT), args=("--kv-store-size", "20"))
    launch = VllmAdapter().launch(assignment(plan=stores), NODE)
    options = parse(launch.argv[3:])
    assert (options.kv_store, options.kv_store_gib, options.vllm_args) == (NODE.cache.parent / "kv", (20.0, 1.0), ())
    assert launch.writes == (NODE.cache.parent / "kv",)
    assert VllmAdapter().launch(assignment(plan=plan(ARTIFACT)), NODE).writes == ()


def test_an_adapter_without_weights_is_not_served() -> None:
    given = assignment(plan=structs.replace(plan(ARTIFACT), adapters=(PlanAdapter("acme/tuned"),)))
    with pytest.raises(EngineUnavailable, match="adapter acme/tuned names no artifact to load"):
        VllmAdapter().launch(given, NODE)


def test_the_environment_is_the_plans_and_the_nodes() -> None:
    env = VllmAdapter().launch(assignment(plan=plan(ARTIFACT)), NODE).env
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["PYTHONPATH"] == "/code"
    assert env["SWITCHYARD_NODE_ID"] == "n-00000001"


@pytest.mark.parametrize(
    "refusal",
    [
        Refusal(None, "names no artifact"),
        Refusal(
            Artifact("s3://bucket/model", "sha256:../x"), "'sha256:../x' is not the digest of an artifact; it must be"
        ),
        Refusal(Artifact("s3:///model", f"sha256:{'1' * 64}"), "s3:///model cannot be fetched; it must be file:///"),
        Refusal(Artifact("file://elsewhere/model", "sha256:12"), "elsewhere/model cannot be fetched; it must be"),
        Refusal(Artifact("file:model", "sha256:12"), "file:model cannot be fetched; it must be"),
    ],
    ids=lambda refusal: refusal.reason,
)
def test_only_an_artifact_that_can_be_had_is_served(refusal: Refusal) -> None:
    with pytest.raises(EngineUnavailable, match=refusal.reason):
        VllmAdapter().launch(assignment(plan=plan(refusal.artifact)), NODE)


def test_a_node_without_vllm_says_how_to_install_it() -> None:
    with pytest.raises(EngineUnavailable, match=r"engine_agent\.engines\.vllm\.environment install"):
        VllmAdapter().launch(assignment(plan=plan(ARTIFACT)), context())


def test_a_leader_is_told_of_its_followers_and_where_they_meet_it() -> None:
    leader = assignment(plan=plan(ARTIFACT), generation=2, peers=(peer(0), peer(1)))
    options = parse(VllmAdapter().launch(leader, NODE).argv[3:])
    assert (options.role, options.rank, options.followers) == (MemberRole.LEADER, 0, 1)
    assert (options.leader_address, options.leader_port) == ("127.0.0.1", rendezvous_port(PORT_BASE, 2))
    assert options.join_timeout_s == 60.0


def test_a_follower_is_told_where_its_leader_is() -> None:
    options = parse(VllmAdapter().launch(FOLLOWER, NODE).argv[3:])
    assert (options.role, options.rank, options.followers) == (MemberRole.FOLLOWER, 1, 1)
    assert (options.leader_address, options.leader_port) == ("10.0.0.1", rendezvous_port(PORT_BASE, 2))
    assert options.admin_port == PORT_BASE + ENGINE_ADMIN


def test_a_follower_without_a_leader_cannot_start() -> None:
    with pytest.raises(EngineUnavailable, match="names no peer of rank 0"):
        VllmAdapter().launch(structs.replace(FOLLOWER, peers=(peer(1),)), NODE)


def test_health_is_asked_of_the_engine_itself() -> None:
    assert VllmAdapter().health_url(assignment(), NODE) == f"http://127.0.0.1:{PORT_BASE + ENGINE}/health"
    assert VllmAdapter().health_url(FOLLOWER, NODE) == f"http://127.0.0.1:{PORT_BASE + ENGINE_ADMIN}/health"


def test_weights_in_s3_are_fetched_first_into_the_machines_cache_and_so_is_a_draft() -> None:
    drafting = json.dumps({"method": "draft_model", "model": "s3://models/draft", "num_speculative_tokens": 3})
    fetched = structs.replace(
        plan(Artifact("s3://models/llama", f"sha256:{'a' * 64}")),
        draft=Artifact("s3://models/draft", f"sha256:{'b' * 64}"),
        args=("--speculative-config", drafting),
    )
    launch = VllmAdapter().launch(structs.replace(FOLLOWER, plan=fetched), NODE)
    split = launch.argv.index("--")
    assert launch.argv[:split] == (
        *(sys.executable, "-m", "engine_agent.engines.launch_artifacts"),
        *("--cache", "/cache/fetched", "--health-port", str(PORT_BASE + ENGINE_ADMIN)),
        *("--fetch", "s3://models/llama", f"sha256:{'a' * 64}", "--fetch", "s3://models/draft", f"sha256:{'b' * 64}"),
    )
    assert launch.argv[split + 1 : split + 4] == ("/engines/bin/python", "-m", "engine_agent.engines.vllm.serve")
    options = parse(launch.argv[split + 4 :])
    assert str(options.model_dir) == f"/cache/fetched/{'a' * 64}"
    assert options.draft == (f"/cache/fetched/{'b' * 64}", f"sha256:{'b' * 64}")
    assert json.loads(options.vllm_args[1])["model"] == f"/cache/fetched/{'b' * 64}"
    assert (launch.reads, launch.writes) == ((), (NODE.cache,))
    assert launch.programs == (Path("/engines/bin/python"),)


def test_a_draft_model_is_checked_like_the_model() -> None:
    given = structs.replace(plan(ARTIFACT), draft=Artifact("file:///cache/draft-7", "sha256:7"))
    options = parse(VllmAdapter().launch(assignment(plan=given), NODE).argv[3:])
    assert options.draft == ("/cache/draft-7", "sha256:7")


def test_an_engine_that_hands_over_has_a_port_for_it_and_its_packages() -> None:
    given = structs.replace(assignment(plan=plan(ARTIFACT)), cell_role=CellRole.DECODE, kv_layout="a")
    launch = VllmAdapter().launch(given, context(vllm="/cache/engines/vllm-cpu/bin/python"))
    assert launch.argv[launch.argv.index("--kv-port") + 1] == str(PORT_BASE + KV_TRANSFER)
    assert parse(launch.argv[3:]).kv_port == PORT_BASE + KV_TRANSFER
    assert launch.env["PYTHONPATH"] == "/code:/cache/engines/vllm-kv-transfer"
    assert Path("/cache/engines/vllm-kv-transfer") in launch.reads
    assert "--kv-port" not in VllmAdapter().launch(assignment(plan=plan(ARTIFACT)), NODE).argv
