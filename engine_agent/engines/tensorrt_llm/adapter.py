"""TensorRT-LLM for the agent: the command line and the configuration file of its server, and what the cell proxy must
know of it. Features that this adapter does not support are refused by name. Pure.

Written from the source and documentation of `trtllm-serve` with its PyTorch backend; it has not been run here."""

import json
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from engine_agent.engines.base import (
    LOOPBACK,
    EngineContext,
    Launch,
    after_fetching,
    engine_python,
    local_folder,
    member_environment,
    member_health_url,
    plain_artifact,
    read_in_place,
)
from engine_agent.engines.sglang.adapter import text_members
from engine_agent.protocol.engine_options import given_options
from engine_agent.protocol.messages import Assignment, EnginePlan
from engine_agent.protocol.ports import ENGINE

FOLDER = "tensorrt-llm"
"""In the node's home: the configuration file, and a link to the weights that has the model's name."""
METRICS_PATH = "/prometheus/metrics"
"""Exists with `return_perf_metrics`. `/metrics` is JSON, and reading it removes what was read."""
GIB = 1024**3
REFUSED_MEMBERS = (
    *("agent_hierarchy", "best_of", "chat_template", "conversation_params", "disaggregated_params", "documents"),
    *("lora_request", "media_io_kwargs", "mm_processor_kwargs", "prompt_ignore_length", "return_context_logits"),
    *("detokenize", "truncate_prompt_tokens", "early_stopping", "length_penalty"),
)
"""Members by which a client could choose another server, run a template, or get an answer that the proxy cannot count.
"""


class TensorrtLlmAdapter:
    """Runs `python -m tensorrt_llm.commands.serve`, which is `trtllm-serve`, after a check of the weights."""

    name = "tensorrt-llm"

    def launch(self, assignment: Assignment, context: EngineContext) -> Launch:
        """See `EngineAdapter.launch`; the plan's `args` are the options in `TENSORRT_LLM` of
        `engine_agent.protocol.engine_options`."""
        plan = assignment.plan
        python = engine_python(context, self.name, "TensorRT-LLM")
        artifact = plain_artifact(assignment, self.name)
        folder = context.home / FOLDER
        link, file = folder / plan.served_model, folder / "config.yml"
        options, configuration = split_options(plan.args)
        argv = (
            *(sys.executable, "-m", "engine_agent.engines.checked_start", "--node-id", context.node_id),
            *("--model-dir", str(local_folder(artifact, context.cache)), "--digest", artifact.digest),
            *("--link", str(link), "--file", str(file), json.dumps(configuration, sort_keys=True), "--"),
            *(str(python), "-m", "tensorrt_llm.commands.serve", "serve", str(link), "--backend", "pytorch"),
            *("--host", LOOPBACK, "--port", str(context.port_base + ENGINE), "--extra_llm_api_options", str(file)),
            *options,
        )
        env = {**member_environment(assignment, context), **ENVIRONMENT_VARIABLES}
        launch = Launch(argv, env, reads=read_in_place(plan), writes=(folder,), programs=(python,))
        return after_fetching(launch, assignment, context)

    def health_url(self, assignment: Assignment, context: EngineContext) -> str:
        """See `EngineAdapter.health_url`."""
        return member_health_url(assignment, context)

    def proxy_options(self, plan: EnginePlan) -> tuple[str, ...]:
        """See `TunesProxy.proxy_options`."""
        members = msgspec.json.encode(text_members(REFUSED_MEMBERS)).decode()
        return ("--engine-members", members, "--metrics-path", METRICS_PATH)


ENVIRONMENT_VARIABLES = {"HF_HUB_OFFLINE": "1", "TRTLLM_RESPONSES_API_DISABLE_STORE": "1"}


def split_options(args: Sequence[str]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Returns a plan's options in the spelling of `trtllm-serve`, and the contents of its configuration file, which is
    YAML and therefore may be JSON. The file has all of `kv_cache_config`, because older versions replace it as a whole.
    """
    cache: dict[str, Any] = {"enable_block_reuse": False}
    options: list[str] = []
    for flag, value in given_options(args):
        if flag == "--host-cache-gib":
            cache["host_cache_size"] = int(value or 0) * GIB
        elif flag == "--enable-block-reuse":
            cache["enable_block_reuse"] = True
        elif flag == "--kv-cache-dtype":
            cache["dtype"] = value
        elif flag == "--kv-cache-free-gpu-memory-fraction":
            cache["free_gpu_memory_fraction"] = float(value or 0)
        else:
            options += ["--" + flag.removeprefix("--").replace("-", "_"), *(() if value is None else (value,))]
    return tuple(options), {"kv_cache_config": cache, "return_perf_metrics": True}
