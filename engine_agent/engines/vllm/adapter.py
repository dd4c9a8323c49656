"""vLLM for the agent: the launcher's command line in the engine's Python, after the fetch of weights from S3."""

import os
from pathlib import Path

from engine_agent.engines.base import (
    LOOPBACK,
    CompileFolders,
    EngineContext,
    EngineUnavailable,
    Launch,
    after_fetching,
    local_folder,
    member_args,
    member_environment,
    member_health_port,
    member_health_url,
    model_args,
    read_in_place,
    with_local_draft,
)
from engine_agent.engines.vllm import kv_transfer
from engine_agent.engines.vllm.steps import FOLLOWER_STEPS_PATH, STEPS_PATH
from engine_agent.protocol.engine_options import SLEEP_OPTION, STORE_OPTION
from engine_agent.protocol.messages import Assignment, EnginePlan
from engine_agent.protocol.ports import KV_TRANSFER
from engine_agent.protocol.states import CellRole, MemberRole


class VllmAdapter:
    """Runs `python -m engine_agent.engines.vllm.serve` in the Python that has vLLM."""

    name = "vllm"

    def launch(self, assignment: Assignment, context: EngineContext) -> Launch:
        """See `EngineAdapter.launch`; the plan's `args` are vLLM's options."""
        python = context.engine_pythons.get(self.name)
        if python is None:
            raise EngineUnavailable(
                "vLLM is not installed on this node; run python -m engine_agent.engines.vllm.environment install"
            )
        stores = (context.cache.parent / kv_transfer.STORE_FOLDER,) if STORE_OPTION in assignment.plan.args else ()
        hands_over = assignment.cell_role is not CellRole.MIXED
        argv = (
            *(str(python), "-m", "engine_agent.engines.vllm.serve"),
            *member_args(assignment, context),
            *model_args(assignment, context),
            *_adapters(assignment.plan, context.cache),
            *(("--kv-port", str(context.port_base + KV_TRANSFER)) if hands_over else ()),
            *(word for folder in stores for word in ("--kv-store", str(folder))),
            "--",
            *with_local_draft(assignment.plan.args, assignment.plan, context.cache),
        )
        env = member_environment(assignment, context)
        packages = (kv_transfer.packages_folder(python),) if hands_over else ()
        env = {**env, "PYTHONPATH": os.pathsep.join((env["PYTHONPATH"], *map(str, packages)))}
        reads = (*read_in_place(assignment.plan), *packages)
        launch = Launch(argv=argv, env=env, reads=reads, writes=stores, compiles=_compiles(assignment.plan))
        return after_fetching(launch, assignment, context)

    def health_url(self, assignment: Assignment, context: EngineContext) -> str:
        return member_health_url(assignment, context)

    def proxy_options(self, plan: EnginePlan) -> tuple[str, ...]:
        """See `TunesProxy.proxy_options`."""
        return ("--sleeps",) if SLEEP_OPTION in plan.args else ()

    def steps_url(self, assignment: Assignment, context: EngineContext) -> str:
        path = STEPS_PATH if assignment.role is MemberRole.LEADER else FOLLOWER_STEPS_PATH
        return f"http://{LOOPBACK}:{member_health_port(assignment, context)}{path}"


COMPILED = CompileFolders(
    {
        "VLLM_CACHE_ROOT": "vllm",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "TRITON_CACHE_DIR": "triton",
        "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    },
    ("vllm/torch_compile_cache", "vllm/modelinfos", "vllm/deep_gemm", "inductor", "triton", "flashinfer"),
)
"""Of vLLM, torch, Triton and FlashInfer. vLLM's folder also has measurements of one machine, which stay there."""


def _compiles(plan: EnginePlan) -> CompileFolders | None:
    is_eager = "--enforce-eager" in plan.args or plan.env.get("TORCH_COMPILE_DISABLE") == "1"
    return None if is_eager else COMPILED


def _adapters(plan: EnginePlan, cache: Path) -> tuple[str, ...]:
    words: list[str] = []
    for adapter in plan.adapters:
        if adapter.artifact is None:
            raise EngineUnavailable(f"the plan's adapter {adapter.name} names no artifact to load")
        words += ["--adapter", adapter.name, str(local_folder(adapter.artifact, cache)), adapter.artifact.digest]
    return tuple(words)
