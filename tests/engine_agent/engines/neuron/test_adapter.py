"""The command line and environment of a Neuron rank: golden files hold every argument and variable."""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_agent.engines.base import EngineContext, EngineUnavailable
from engine_agent.engines.compile_cache import with_compile_cache
from engine_agent.engines.neuron.adapter import NeuronAdapter
from engine_agent.engines.registry import installed_python
from engine_agent.engines.vllm.options import parse
from engine_agent.protocol.messages import Artifact, Assignment, EnginePlan
from tests.engine_agent.engines.neuron.orders import ARTIFACT, ONE_NODE, TWO_NODES, assignment, neuron_args, node

GOLDEN = Path(__file__).parent / "golden"
CASES = {"one_node": ONE_NODE, "two_nodes_leader": TWO_NODES[0], "two_nodes_follower": TWO_NODES[1]}
DOCUMENTED_SEVERAL_NODES = {
    "FI_PROVIDER": "efa",
    "FI_EFA_USE_DEVICE_RDMA": "1",
    "FI_EFA_FORK_SAFE": "1",
    "ENABLE_NEURON_MULTI_NODE": "true",
    "WORLD_SIZE": "2",
    "NEURON_LOCAL_TP": "32",
}
"""https://github.com/aws-neuron/upstreaming-to-vllm/tree/2.24.0/examples/neuron/multi_node, on two Trn1 nodes."""


def launched(order: Assignment) -> dict[str, Any]:
    launch = NeuronAdapter().launch(order, node(order.rank))
    argv = ["<agent's python>" if word == sys.executable else word for word in launch.argv]
    return {"argv": argv, "env": dict(launch.env)}


@pytest.mark.parametrize("name", CASES)
def test_a_rank_is_started_with_what_its_golden_file_has(name: str) -> None:
    assert launched(CASES[name]) == json.loads((GOLDEN / f"{name}.json").read_text())


@pytest.mark.parametrize("order", CASES.values(), ids=CASES)
def test_the_launcher_of_vllm_understands_what_comes_after_the_fetching(order: Assignment) -> None:
    argv = launched(order)["argv"]
    options = parse(argv[argv.index("engine_agent.engines.neuron.serve") + 1 :], {})
    assert (options.rank, options.followers) == (order.rank, len(order.peers) - 1)
    assert str(options.model_dir) == f"/cache/fetched/{'0123456789abcdef' * 4}"


def test_ranks_differ_in_their_part_of_the_devices_as_the_example_for_several_nodes_has_it() -> None:
    parts = []
    for order in TWO_NODES:
        started = launched(order)
        config = json.loads(started["argv"][started["argv"].index("--additional-config") + 1])
        parts.append(config["override_neuron_config"]["start_rank_id"])
        assert started["env"].items() >= DOCUMENTED_SEVERAL_NODES.items()
        assert started["env"]["NEURON_RANK_ID"] == str(order.rank)
        assert started["env"]["NEURON_RT_ROOT_COMM_ID"] == "10.0.0.0:9405"
    assert parts == [0, 32]


def test_a_model_compiled_for_something_else_is_never_taken() -> None:
    def place(order: Assignment) -> str:
        return str(launched(order)["env"]["NEURON_COMPILED_ARTIFACTS"])

    ours = TWO_NODES[0]
    other_weights = msgspec.structs.replace(ours.plan, artifact=Artifact(ARTIFACT.uri, "sha256:" + "9" * 64))
    other_flags = msgspec.structs.replace(ours.plan, args=(*ours.plan.args, "--seed", "1"))
    orders = [ours, TWO_NODES[1], *(msgspec.structs.replace(ours, plan=plan) for plan in (other_weights, other_flags))]
    assert len({place(order) for order in orders}) == 4
    assert place(msgspec.structs.replace(ours, generation=8)) == place(ours)


def test_weights_on_disk_are_used_where_they_lie() -> None:
    order = assignment(0, neuron_args({}), nodes=1, artifact=Artifact("file:///models/llama", "sha256:1"))
    argv = launched(order)["argv"]
    assert argv[argv.index("--model-dir") + 1] == "/models/llama"


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (assignment(0, neuron_args({"tp_degree": 64}), nodes=2), "has no local_ranks_size: it was rendered for one"),
        (assignment(0, ("--additional-config", "{"), nodes=1), r"the plan's --additional-config is not JSON"),
        (assignment(0, ("--additional-config", "[]"), nodes=1), r"the plan's --additional-config is not a JSON object"),
        (assignment(0, (), nodes=1, artifact=None), "names no artifact to load"),
        (
            assignment(0, (), nodes=1, artifact=Artifact("gs://b/m", "sha256:1")),
            "gs://b/m cannot be fetched; it must be",
        ),
    ],
)
def test_a_plan_that_cannot_run_here_says_why(order: Assignment, reason: str) -> None:
    with pytest.raises(EngineUnavailable, match=reason):
        launched(order)


def test_a_follower_without_a_leader_says_so() -> None:
    alone = msgspec.structs.replace(TWO_NODES[1], peers=TWO_NODES[1].peers[1:])
    with pytest.raises(EngineUnavailable, match="names no peer of rank 0"):
        launched(alone)


def test_a_node_without_neuron_says_where_it_belongs() -> None:
    bare = EngineContext("n-1", Path("/h"), "10.0.0.1", 9400, Path("/code"), {}, Path("/cache/fetched"))
    with pytest.raises(EngineUnavailable, match=r"not installed on this node; .* engines/neuron in the cache"):
        NeuronAdapter().launch(ONE_NODE, bare)


def test_an_environment_or_a_link_to_one_counts_as_installed(tmp_path: Path) -> None:
    assert installed_python("neuron", tmp_path) is None
    (tmp_path / "image" / "bin").mkdir(parents=True)
    (tmp_path / "image" / "bin" / "python").touch()
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "neuron").symlink_to(tmp_path / "image")
    assert installed_python("neuron", tmp_path) == tmp_path / "engines" / "neuron" / "bin" / "python"


def test_leader_and_follower_are_asked_for_health_where_they_answer() -> None:
    assert NeuronAdapter().health_url(TWO_NODES[0], node(0)) == "http://127.0.0.1:9403/health"
    assert NeuronAdapter().health_url(TWO_NODES[1], node(1)) == "http://127.0.0.1:9404/health"


def test_the_plans_environment_replaces_caches_and_network_but_no_secret() -> None:
    plan = EnginePlan("neuron", "m", 1, 1.0, artifact=ARTIFACT, env={"FI_PROVIDER": "tcp", "SWITCHYARD_NODE_ID": "x"})
    order = msgspec.structs.replace(TWO_NODES[0], plan=msgspec.structs.replace(plan, args=TWO_NODES[0].plan.args))
    env = launched(order)["env"]
    assert (env["FI_PROVIDER"], env["SWITCHYARD_NODE_ID"]) == ("tcp", "n-00000000")


def test_neuron_gets_the_folders_of_its_compilers() -> None:
    launch = NeuronAdapter().launch(TWO_NODES[1], node(1))
    cached = with_compile_cache(launch, TWO_NODES[1].plan.env, Path("/c"))
    assert cached.env["NEURON_COMPILED_ARTIFACTS"] == "/c/artifacts"
    assert cached.env["NEURON_COMPILE_CACHE_URL"] == "/c/compiler"
    assert cached.env["VLLM_CACHE_ROOT"] == "/c/vllm"
    assert launch.compiles is not None
    assert launch.compiles.is_one_engines
    assert launch.env["NEURON_COMPILED_ARTIFACTS"].startswith(str(node(1).home))  # without a cache
