"""A worker that keeps the contract of Neuron's plugin and computes nothing, and the two processes of a cell of it.

As the plugin does (vllm_neuron/worker/neuron_worker.py and neuronx_distributed_model_runner.py of 0.4.1 and 0.5.0):
`execute_model` returns None on every rank but the driver's, `sample_tokens` raises where nothing was executed, each
worker is alone in its world, and places in the KV cache are freed in the order of `finished_req_ids`. Ranks add up
their parts row by row, in the order of places, so a request with different places on two ranks gets wrong tokens.

vLLM is the installed version, without attributes that versions pinned by the plugins lack; or such a version, for which
bench/cells/executor_versions.py runs the test.

    python -m tests.engine_agent.engines.vllm.cell.neuron_like leader|follower MODEL_DIR
"""

import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker import worker_base

from tests.engine_agent.engines.vllm.cell.neuron_like_tokens import (
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    RANKS,
    STORE_VARIABLE,
    VOCABULARY,
    part_of,
)


class NeuronLikeWorker(worker_base.WorkerBase):  # type: ignore[misc]  # the engine's libraries have no types here
    """One rank; its KV cache is the tokens that it was given for each place."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._places: dict[str, int] = {}
        self._free = list(range(MAX_NUM_SEQS))
        self._cache: dict[int, list[int]] = {}
        self._sums: dict[str, int] | None = None
        self._added_up = 0
        override = self.vllm_config.additional_config["override_neuron_config"]
        self._rank = override["start_rank_id"] // override["local_ranks_size"]

    def init_device(self) -> None:
        host, port = os.environ[STORE_VARIABLE].split(":")
        self._store = TCPStore(host, int(port), is_master=self._rank == 0, wait_for_workers=False)

    def load_model(self, *, load_dummy_weights: bool = False) -> None: ...

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return {"layers.0": FullAttentionSpec(MAX_MODEL_LEN, num_kv_heads=1, head_size=8, dtype=torch.float32)}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["NHD"]

    def determine_available_memory(self) -> int:
        return 1 << 30

    def initialize_from_config(self, kv_cache_config: Any) -> None: ...

    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """It has no blocks; until 0.16 vLLM calls this."""

    def compile_or_warm_up_model(self) -> Any:
        return worker_base.CompilationTimes(0.0, 0.0) if hasattr(worker_base, "CompilationTimes") else None

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def execute_model(self, scheduler_output: Any) -> Any:
        output = self._run(scheduler_output)
        return output if self.is_driver_worker else None

    def _run(self, scheduled: Any) -> Any:
        for request in scheduled.finished_req_ids:
            if request in self._places:
                self._free.append(self._places.pop(request))
        if scheduled.total_num_scheduled_tokens == 0:
            return EMPTY_MODEL_RUNNER_OUTPUT
        for new in scheduled.scheduled_new_reqs:
            place = self._places[new.req_id] = self._free.pop()
            self._cache[place] = list(new.prompt_token_ids)
        requests = sorted(scheduled.num_scheduled_tokens, key=self._places.__getitem__)
        rows = [part_of(self._cache[self._places[request]]) for request in requests]
        self._sums = dict(zip(requests, self._add_up(rows), strict=True))
        return None

    def _add_up(self, rows: list[int]) -> list[int]:
        """Returns the sum of all ranks' rows, each in its rank's order."""
        self._added_up += 1
        self._store.set(f"{self._added_up}/{self._rank}", json.dumps(rows))
        parts = [json.loads(self._store.get(f"{self._added_up}/{rank}")) for rank in range(RANKS)]
        return [sum(row) % VOCABULARY for row in zip(*parts, strict=True)]

    def sample_tokens(self, grammar_output: Any) -> Any:
        if self._sums is None:
            raise RuntimeError("sample_tokens() called without prior execute_model(). Logits must be cached first.")
        sums, self._sums = self._sums, None
        for request, token in sums.items():
            self._cache[self._places[request]].append(token)
        return ModelRunnerOutput(
            req_ids=list(sums),
            req_id_to_index={request: row for row, request in enumerate(sums)},
            sampled_token_ids=[[token] for token in sums.values()],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def shutdown(self) -> None: ...


def be_older_follower() -> None:
    """Removes what vLLM 0.13 lacks: platforms do not choose the size of a block, and a worker's constructor takes its
    configuration."""
    from vllm.platforms.interface import Platform
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from tests.engine_agent.engines.vllm.cell.neuron_like_platform import NeuronLikePlatform

    del NeuronLikePlatform.update_block_size_for_backend
    if "update_block_size_for_backend" in vars(Platform):
        del Platform.update_block_size_for_backend
    if "vllm_config" in inspect.signature(WorkerWrapperBase).parameters:
        return
    as_now = WorkerWrapperBase.__init__

    def as_then(self: Any, vllm_config: Any, rpc_rank: int = 0, global_rank: int | None = None) -> None:
        assert vllm_config is not None
        as_now(self, rpc_rank, global_rank)

    WorkerWrapperBase.__init__ = as_then


def be_older_leader() -> None:
    """Removes what vLLM 0.13, 0.16 and 0.24 lack: executors warm up in `initialize_from_config`, by a call."""
    from vllm.v1.executor.abstract import Executor

    if not hasattr(Executor, "compile_or_warm_up_model"):
        return
    as_now = Executor.initialize_from_config

    def as_then(self: Any, kv_cache_configs: Any) -> None:
        as_now(self, kv_cache_configs)
        self.collective_rpc("compile_or_warm_up_model")

    Executor.initialize_from_config = as_then
    del Executor.compile_or_warm_up_model

    from engine_agent.engines.vllm.executor import LeaderFollowerExecutor

    # Not called in that version.
    LeaderFollowerExecutor.compile_or_warm_up_model = lambda self: None  # type: ignore[method-assign]


def lead(model_dir: Path) -> None:
    """Reads waves of requests, one JSON line each: id -> [prompt, tokens]; writes the answers."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    registry._run_in_subprocess = lambda inspect: inspect()  # as in core_process: no second import of vLLM
    config = EngineArgs(
        model=str(model_dir),
        skip_tokenizer_init=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        num_gpu_blocks_override=MAX_NUM_SEQS + 1,
        enable_prefix_caching=False,
        enforce_eager=True,
        distributed_executor_backend="engine_agent.engines.vllm.executor.LeaderFollowerExecutor",
        additional_config={"override_neuron_config": {"local_ranks_size": 32, "world_size": 64, "tp_degree": 64}},
    ).create_engine_config()
    core = EngineCore(config, Executor.get_class(config), log_stats=False)
    _say({})
    for line in sys.stdin:
        answers: dict[str, list[int]] = {}
        for name, (prompt, tokens) in json.loads(line).items():
            answers[name] = []
            asked = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            core.add_request(*core.preprocess_add_request(_request(name, prompt, asked)))
        while core.scheduler.has_requests():  # the last step has nothing but requests that are over
            outputs, executed = core.step_fn()
            core.post_step(executed)
            for each in (outputs or {}).values():
                for output in each.outputs:
                    answers[output.request_id] += output.new_token_ids
        _say(answers)
    core.shutdown()


def _request(name: str, prompt: list[int], asked: Any) -> Any:
    """With all fields that have no default in one of the versions."""
    from vllm.v1.engine import EngineCoreRequest

    empty = dict.fromkeys(
        ("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank", "eos_token_id")
    )
    given = {**empty, "request_id": name, "prompt_token_ids": prompt, "sampling_params": asked, "arrival_time": 0.0}
    fields = EngineCoreRequest.__struct_fields__
    return EngineCoreRequest(**{field: value for field, value in given.items() if field in fields})


def _say(answers: dict[str, list[int]]) -> None:
    sys.stdout.write(json.dumps(answers) + "\n")
    sys.stdout.flush()


def main(role: str, model_dir: str) -> None:
    """Runs a member until the cell ends."""
    if role == "leader":
        be_older_leader()
        lead(Path(model_dir))
        return
    be_older_follower()
    from engine_agent.engines.vllm.cell.member import Shutdown, member_from
    from engine_agent.engines.vllm.cell.worker import follow

    follow(member_from(os.environ), Path(model_dir), lambda _reason: None, Shutdown())


if __name__ == "__main__":
    main(*sys.argv[1:])
