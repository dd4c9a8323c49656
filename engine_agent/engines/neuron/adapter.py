"""vLLM on Neuron for the agent: its command line, and what each rank adds to the cell's plan: its devices, environment
and caches. Pure."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine_agent.engines.base import (
    CompileFolders,
    EngineContext,
    EngineUnavailable,
    Launch,
    after_fetching,
    engine_python,
    follower_count,
    json_option,
    leader_place,
    member_args,
    member_environment,
    member_health_url,
    model_args,
    read_in_place,
    with_json_option,
    with_local_draft,
)
from engine_agent.protocol.messages import Assignment
from engine_agent.protocol.ports import COLLECTIVES_MASTER, ROOT_COMMUNICATOR


class NeuronAdapter:
    """Runs `python -m engine_agent.engines.neuron.serve` in the Python of the Neuron SDK."""

    name = "neuron"

    def launch(self, assignment: Assignment, context: EngineContext) -> Launch:
        """See `EngineAdapter.launch`; the plan's `args` are vLLM's options, `--additional-config` has NxDI's."""
        python = engine_python(context, self.name, "Neuron's vLLM")
        argv = (
            *(str(python), "-m", "engine_agent.engines.neuron.serve"),
            *member_args(assignment, context),
            *model_args(assignment, context),
            "--",
            *rank_args(assignment, context.cache),
        )
        env = {**rank_environment(assignment, context), **member_environment(assignment, context)}
        writes = (context.home / NEURON_FOLDER,)
        launch = Launch(argv=argv, env=env, reads=read_in_place(assignment.plan), writes=writes, compiles=COMPILED)
        return after_fetching(launch, assignment, context)

    def health_url(self, assignment: Assignment, context: EngineContext) -> str:
        return member_health_url(assignment, context)


NEURON_FOLDER = "neuron"
KEY_DIGITS = 16
COMPILED = CompileFolders(
    {"NEURON_COMPILED_ARTIFACTS": "artifacts", "NEURON_COMPILE_CACHE_URL": "compiler", "VLLM_CACHE_ROOT": "vllm"},
    ("artifacts", "compiler", "vllm/neuron"),
    is_one_engines=True,
)
"""Of NxDI, of the Neuron compiler, and of newer plugins. NxDI writes its artifacts without a lock."""


@dataclass(frozen=True)
class NodePart:
    """A node's part of a compiled model that spans several nodes: `ranks` devices, starting at number `first`."""

    first: int
    ranks: int


def node_part(args: Sequence[str], rank: int) -> NodePart | None:
    """Returns this rank's part according to the plan's arguments; None in a cell of one node. Raises EngineUnavailable
    if the plan's NxDI configuration is not JSON."""
    override = json_option(args, "--additional-config").get("override_neuron_config", {})
    ranks = override.get("local_ranks_size")
    return None if ranks is None else NodePart(rank * ranks, ranks)


def rank_args(assignment: Assignment, cache: Path) -> tuple[str, ...]:
    """Returns the plan's arguments with this rank's `start_rank_id`, and with the draft model's folder on this node.
    Raises EngineUnavailable if a JSON argument of the plan is malformed, or the plan was rendered for one node and the
    cell has several."""
    plan = assignment.plan
    part = node_part(plan.args, assignment.rank)
    if part is None and follower_count(assignment):
        raise EngineUnavailable(
            f"cell {assignment.cell} has {follower_count(assignment) + 1} nodes, but the plan's override_neuron_config "
            f"has no local_ranks_size: it was rendered for one"
        )
    args = tuple(plan.args)
    if part is not None:
        config = json_option(args, "--additional-config")
        config["override_neuron_config"]["start_rank_id"] = part.first
        args = with_json_option(args, "--additional-config", config)
    return with_local_draft(args, plan, cache)


def rank_environment(assignment: Assignment, context: EngineContext) -> dict[str, str]:
    """Returns Neuron's variables for this rank; the plan may replace those of caches and of the network.

    The folder of the compiled model is named by everything that it depends on, because the plugin loads the content of
    NEURON_COMPILED_ARTIFACTS without a comparison. Each rank has its own folder, because its part of the devices is
    compiled in."""
    folder = context.home / NEURON_FOLDER
    args = rank_args(assignment, context.cache)
    compiled = folder / "compiled" / _compile_key(assignment, args) / f"rank-{assignment.rank}"
    wanted = {
        "VLLM_PLUGINS": "neuron",
        "NEURON_COMPILED_ARTIFACTS": str(compiled),
        "NEURON_COMPILE_CACHE_URL": str(folder / "compile-cache"),
    }
    part = node_part(assignment.plan.args, assignment.rank)
    return wanted if part is None else wanted | _several_nodes(assignment, context, part)


def _several_nodes(assignment: Assignment, context: EngineContext, part: NodePart) -> dict[str, str]:
    """As in examples/neuron/multi_node of https://github.com/aws-neuron/upstreaming-to-vllm (tag 2.24.0)."""
    host, port_base = leader_place(assignment, context)
    return {
        "FI_PROVIDER": "efa",
        "FI_EFA_USE_DEVICE_RDMA": "1",
        "FI_EFA_FORK_SAFE": "1",
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port_base + COLLECTIVES_MASTER),
        "NEURON_RT_ROOT_COMM_ID": f"{host}:{port_base + ROOT_COMMUNICATOR}",
        "ENABLE_NEURON_MULTI_NODE": "true",
        "WORLD_SIZE": str(follower_count(assignment) + 1),
        "NEURON_RANK_ID": str(assignment.rank),
        "NEURON_LOCAL_TP": str(part.ranks),
    }


def _compile_key(assignment: Assignment, args: Sequence[str]) -> str:
    digests = [item.digest for item in (assignment.plan.artifact, assignment.plan.draft) if item is not None]
    return hashlib.sha256(json.dumps([digests, list(args)]).encode()).hexdigest()[:KEY_DIGITS]
