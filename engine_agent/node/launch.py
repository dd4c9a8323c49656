"""Command lines and environments of an assignment's processes, as pure code: the cell proxy's, and the part of an
engine's that its adapter does not state."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import msgspec

from engine_agent.engines.base import LOOPBACK, EngineContext, Launch, TunesProxy, json_option
from engine_agent.engines.generic.environment import HEALTH_PATH
from engine_agent.engines.registry import ADAPTERS, REPLAYING_ENGINES
from engine_agent.protocol.engine_options import (
    BATCH_PROMPTS_UNLIMITED,
    PRIORITY_SCHEDULING,
    READS_WHOLE_PROMPTS,
)
from engine_agent.protocol.fingerprint import (
    FINGERPRINT_VARIABLE,
    Fingerprint,
    fingerprint_to_variable,
    rank_fingerprint,
)
from engine_agent.protocol.machine_messages import NodeResources
from engine_agent.protocol.messages import Assignment, EnginePlan
from engine_agent.protocol.ports import ENGINE, PROXY, PROXY_ADMIN
from engine_agent.protocol.states import CellRole


@dataclass(frozen=True, slots=True)
class NodePlace:
    """The place of a node: folder, address, ports, the machine's cache of artifacts, and installed engines."""

    node_id: str
    home: Path
    host: str
    port_base: int
    repo_root: Path
    cache: Path
    engine_pythons: Callable[[], Mapping[str, Path]]
    has_links: bool = True
    """Ingresses reach its cells over TLS."""
    owns: NodeResources | None = None
    """The node's part of its machine; None: all of it."""

    def context(self) -> EngineContext:
        """The place for engine adapters, without the engines: probing a running engine only needs its address."""
        return EngineContext(self.node_id, self.home, self.host, self.port_base, self.repo_root, {}, self.cache)

    def launch_context(self, build: Mapping[str, Path] | None = None) -> EngineContext:
        """The same with the installed engines, which requires reading files. `build`: the engine of a build, which
        replaces all of them."""
        installed = {engine: python for engine, python in self.engine_pythons().items() if python.exists()}
        return replace(self.context(), engine_pythons=installed if build is None else build)


def proxy_launch(assignment: Assignment, context: EngineContext, identity: Path | None = None) -> Launch:
    """Command line and environment of a leader's cell proxy. `identity`: the home of its copy of the identity; None:
    ingresses reach it without TLS. Raises EngineUnavailable if a JSON argument of the plan is invalid."""
    base = context.port_base
    argv = (
        *(sys.executable, "-m", "engine_agent.cell_proxy"),
        *("--node-id", context.node_id),
        *("--cell", assignment.cell),
        *("--generation", str(assignment.generation)),
        *("--host", context.host),
        *("--port", str(base + PROXY)),
        *("--admin-port", str(base + PROXY_ADMIN)),
        *("--engine", f"http://{LOOPBACK}:{base + ENGINE}"),
        *("--model", assignment.plan.served_model),
        *(word for adapter in assignment.plan.adapters for word in ("--adapter", adapter.name)),
        *("--max-concurrency", str(assignment.plan.max_concurrency)),
        *("--golden", msgspec.json.encode(assignment.plan.golden).decode()),
        *(("--health-path", HEALTH_PATH) if assignment.plan.engine == "generic" else ()),
        *_role(assignment),
        *_prompt_limit(assignment.plan),
        *(("--priorities",) if _schedules_by_priority(assignment.plan) else ()),
        *(("--replays",) if assignment.plan.engine in REPLAYING_ENGINES else ()),
        *(("--orders-classes",) if _orders_classes(assignment.plan) else ()),
        *(word for modality in assignment.plan.modalities for word in ("--modality", modality)),
        *_of_the_engine(assignment.plan),
        *(("--identity", str(identity)) if identity else ()),
    )
    reads = (identity,) if identity else ()
    return Launch(argv=argv, env={"PYTHONPATH": str(context.repo_root)}, reads=reads)


def _of_the_engine(plan: EnginePlan) -> tuple[str, ...]:
    adapter: object = ADAPTERS.get(plan.engine)
    return adapter.proxy_options(plan) if isinstance(adapter, TunesProxy) else ()


def _role(assignment: Assignment) -> tuple[str, ...]:
    if assignment.cell_role is CellRole.MIXED:
        return ()
    return ("--cell-role", assignment.cell_role, "--kv-layout", assignment.kv_layout)


def _prompt_limit(plan: EnginePlan) -> tuple[str, ...]:
    """Longest prompt of an engine that may be compiled for less than its context, and exits at a longer prompt. Only
    one of the two plugins rejects such prompts."""
    if plan.engine != "neuron":
        return ()
    longest = json_option(plan.args, "--additional-config").get("max_prompt_length")
    return () if longest is None else ("--max-prompt-tokens", str(longest))


def _schedules_by_priority(plan: EnginePlan) -> bool:
    """The simulator always does; vLLM rejects priorities unless its arguments allow them."""
    return plan.engine == "sim" or any(pair == PRIORITY_SCHEDULING for pair in pairwise(plan.args))


def _orders_classes(plan: EnginePlan) -> bool:
    """Whether the engine limits batch prompts in each step. Neuron's plugin has its own scheduler. Where arguments do
    not tell (`vllm_versions.why_no_class_order`), the window of the cell's batch work limits them."""
    return (
        plan.engine in ("sim", "vllm")
        and _schedules_by_priority(plan)
        and BATCH_PROMPTS_UNLIMITED not in pairwise(plan.args)
        and not READS_WHOLE_PROMPTS.intersection(plan.args)
    )


def with_fingerprint(launch: Launch, plan: EnginePlan, machine: Fingerprint) -> Launch:
    """The launch of an engine with the fingerprint of its rank: see `engine_agent.protocol.fingerprint`."""
    weights = plan.artifact.digest if plan.artifact is not None else None
    adapters = {each.name: each.artifact.digest if each.artifact else "" for each in plan.adapters}
    build = plan.build.digest if plan.build is not None else ""
    own = rank_fingerprint(machine, plan.engine, plan.args, plan.env, weights, adapters, build)
    return replace(launch, env={**launch.env, FINGERPRINT_VARIABLE: fingerprint_to_variable(own)})


def proxy_admin_url(context: EngineContext, path: str) -> str:
    """URL of the proxy's administration, which always listens on loopback."""
    return f"http://{LOOPBACK}:{context.port_base + PROXY_ADMIN}{path}"
