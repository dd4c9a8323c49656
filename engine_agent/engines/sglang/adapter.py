"""SGLang for the agent: the command line of its server on every rank of a cell, and what the cell proxy must know of
it. Features that this adapter does not support are refused by name. Pure.

Written from the sources of SGLang 0.5.9 and 0.5.23, the versions of the recipes; neither has been run here."""

import sys

import msgspec

from engine_agent.engines.base import (
    LOOPBACK,
    EngineContext,
    Launch,
    after_fetching,
    engine_python,
    follower_count,
    leader_endpoint,
    local_folder,
    member_environment,
    member_health_port,
    member_health_url,
    plain_artifact,
    read_in_place,
)
from engine_agent.protocol.messages import Assignment, EnginePlan
from engine_agent.protocol.ports import COLLECTIVES_MASTER

REFUSED_MEMBERS = (
    *("rid", "session_id", "session_params", "extra_key"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank", "disagg_prefill_dp_rank"),
    *("routed_dp_rank", "lora_path", "custom_logit_processor", "custom_params", "custom_labels", "input_ids"),
    *("images_config", "video_config", "mm_processor_kwargs", "use_audio_in_video", "watermark", "task"),
    *("return_hidden_states", "return_routed_experts", "routed_experts_start_len"),
    *("ebnf", "json_schema", "regex", "stop_regex", "structured_outputs", "best_of"),
)
"""Members by which a client could name another request or server, run code, read the engine's state, or cause work that
no limit knows; and `structured_outputs`, which SGLang would ignore."""


class SglangAdapter:
    """Runs `python -m sglang.launch_server` in the Python that has SGLang, after a check of the weights."""

    name = "sglang"

    def launch(self, assignment: Assignment, context: EngineContext) -> Launch:
        """See `EngineAdapter.launch`; the plan's `args` are the options in `SGLANG` of
        `engine_agent.protocol.engine_options`."""
        plan = assignment.plan
        python = engine_python(context, self.name, "SGLang")
        artifact = plain_artifact(assignment, self.name, one_node=False)
        folder = str(local_folder(artifact, context.cache))
        argv = (
            *(sys.executable, "-m", "engine_agent.engines.checked_start", "--node-id", context.node_id),
            *("--model-dir", folder, "--digest", artifact.digest, "--"),
            *(str(python), "-m", "sglang.launch_server"),
            *("--model-path", folder, "--served-model-name", plan.served_model),
            *("--host", LOOPBACK, "--port", str(member_health_port(assignment, context)), "--enable-metrics"),
            *_ranks(assignment, context),
            *plan.args,
        )
        env = {**member_environment(assignment, context), **ENVIRONMENT_VARIABLES}
        launch = Launch(argv, env, reads=read_in_place(plan), programs=(python,))
        return after_fetching(launch, assignment, context)

    def health_url(self, assignment: Assignment, context: EngineContext) -> str:
        """See `EngineAdapter.health_url`. A follower answers 200 as soon as its processes have loaded the model."""
        return member_health_url(assignment, context)

    def proxy_options(self, plan: EnginePlan) -> tuple[str, ...]:
        """See `TunesProxy.proxy_options`."""
        return ("--engine-members", msgspec.json.encode(text_members(REFUSED_MEMBERS)).decode())


ENVIRONMENT_VARIABLES = {
    "HF_HUB_OFFLINE": "1",  # nothing is loaded from a hub
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",  # otherwise each poll of /health generates a token
}


def text_members(refused: tuple[str, ...]) -> dict[str, object]:
    """Members for a server that loads images from paths and URLs of requests, and whose other APIs were not examined:
    `EngineMembers` of the cell proxy."""
    paths = ("/v1/chat/completions", "/v1/completions")
    return {"refused": refused, "sequences": 1, "paths": paths, "text_only": True}


def _ranks(assignment: Assignment, context: EngineContext) -> tuple[str, ...]:
    """Where the ranks of a cell meet: a fixed port instead of a random one, which could be another node's."""
    if follower_count(assignment) == 0:
        return ("--nccl-port", str(context.port_base + COLLECTIVES_MASTER))
    return (
        *("--nnodes", str(follower_count(assignment) + 1), "--node-rank", str(assignment.rank)),
        *("--dist-init-addr", leader_endpoint(assignment, context)),
    )
