"""Random versions on random instance types: vLLM's parser and configuration accept what validation accepts, and what
validation refuses is refused with field, value and rule."""

import json
import os
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from engine_agent.engines.vllm.environment import install
from engine_agent.engines.vllm.options import parse
from engine_agent.engines.vllm.serve import vllm_argv
from lab.checkpoints import CONFIGS
from lab.versions import spec
from lab.vllm_probe import ENVIRONMENT, MODULE, ROOT, read_answers, written_questions
from models_registry.instance_types.planner import INSTANCE_TYPES, InstanceShape
from models_registry.versions.planning.checkpoint import Checkpoint, computed_weights, read_shape
from models_registry.versions.planning.engine_arguments import render_version
from models_registry.versions.planning.lifecycle import evaluate_version
from models_registry.versions.planning.spec import HeadCounts, VersionSpec
from tests.engine_agent.engines.vllm.forks import ForkServers
from tests.engine_agent.engines.vllm.running_cell import CACHE

pytestmark = pytest.mark.vllm

VERSIONS, VERSIONS_IN_LONG_RUN = 50, 2000
PARSE_LIMIT_S = 1200.0
EIGHT_CPUS = InstanceShape("eight.cpu", "cpu", cores=8, memory_gib=64)
MACHINES: Mapping[str, InstanceShape] = {**INSTANCE_TYPES, EIGHT_CPUS.name: EIGHT_CPUS}
REASON = re.compile(r" is .+[;,] |needs? .+; |do not fit with|parallelism\.\S+\.(tp|nodes|pp)")
"""Every refusal names a field with its value and a rule, or the memory with its arithmetic."""


@dataclass(frozen=True)
class Drawn:
    machine: InstanceShape
    version: VersionSpec
    checkpoint: Checkpoint
    config: Mapping[str, Any]


def drawn(source: random.Random) -> Drawn:
    config = _config(source)
    shape = read_shape(config)
    machine = source.choice([EIGHT_CPUS] * 3 + [INSTANCE_TYPES["p5.48xlarge"]] * 3 + list(MACHINES.values()))
    most = 5000 if machine.accelerator == "cpu" else 300  # on a CPU vLLM has smaller steps by default
    degrees = {
        "nodes": source.choice((1, 1, 1, 1, 2, 3)),
        "tp": source.choice((1, 1, 1, 2, 2, 4, 4, 8, 3, 6, 12, 16)),
        "pp": source.choice((1, 1, 1, 1, 1, 2, 3, 31)),
    }
    version = spec(
        "vllm",
        machine,
        {name: degree for name, degree in degrees.items() if source.random() < 0.8},
        heads=HeadCounts(),
        golden_waiver="drawn",
        artifact_uri="file:///model",
        context_length=source.choice((16, 512, 2048, 8192, 8193, 40_000)),
        max_concurrency=source.choice((1, 2, 16, 300, most)),
        engine_options=_options(source),
        speculation={"method": "ngram", "tokens": 3} if source.random() < 0.15 else {},
    )
    return Drawn(machine, version, Checkpoint(shape, computed_weights(shape)), config)


def _config(source: random.Random) -> dict[str, Any]:
    config = dict(CONFIGS[source.choice(list(CONFIGS))])
    if config["model_type"] in ("llama", "mistral"):
        heads = source.choice((4, 8, 9, 12, 16))
        kv = source.choice([kv for kv in (1, 2, 3, 4, 8, heads) if heads % kv == 0])
        layers = source.choice((2, 4, 12, 30))
        config |= {"num_attention_heads": heads, "num_key_value_heads": kv, "num_hidden_layers": layers}
        config |= {"hidden_size": heads * 64, "torch_dtype": source.choice(("bfloat16", "float32", "float16"))}
    return config


def _options(source: random.Random) -> dict[str, Any]:
    possible: dict[str, tuple[Any, ...]] = {
        "enforce_eager": (True, False),
        "enable_prefix_caching": (True,),
        "no_enable_prefix_caching": (True,),
        "enable_chunked_prefill": (True,),
        "no_enable_chunked_prefill": (True,),
        "gpu_memory_utilization": (0.1, 0.5, 0.92, 1.0, 1.5, 0),
        "kv_cache_memory_bytes": (2**28, 2**33),
        "max_num_batched_tokens": (16, 256, 2048, 65536),
        "block_size": (16, 32, 128, 7),
        "dtype": ("auto", "bfloat16", "float32", "float64"),
        "scheduling_policy": ("priority", "fcfs"),
        "seed": (0, 7),
        "max_logprobs": (5, -1),
        "load_format": ("auto", "safetensors"),
    }
    chosen = source.sample(sorted(possible), k=source.choice((0, 1, 1, 2, 3)))
    return {name: source.choice(possible[name]) for name in chosen}


def server_options(one: Drawn, folder: Path) -> list[str]:
    """The command line that an agent would start, with a model that has only a configuration."""
    rendering = render_version(one.version, one.machine)
    followers = rendering.degrees.nodes - 1
    own = [
        "--rank",
        "0",
        "--role",
        "leader",
        "--followers",
        str(followers),
        "--model-dir",
        str(folder),
        "--digest",
        "d",
    ]
    own += ["--cell", "c", "--generation", "1", "--served-model", "m", "--node-id", "n-1", "--host", "127.0.0.1"]
    own += ["--port", "9000"] + (["--leader", "127.0.0.1:9001"] if followers else [])
    return vllm_argv(parse([*own, "--", *rendering.plan.args], {}))


def accepted(ones: list[Drawn]) -> Iterator[Drawn]:
    for one in ones:
        checkpoints = {one.version.artifact_uri: one.checkpoint}
        problem = evaluate_version(one.version, MACHINES, checkpoints).problems[one.machine.name]
        if problem:
            assert REASON.search(problem), problem
        else:
            yield one


def test_vllm_accepts_every_version_that_is_valid(thorough: bool, fork_servers: ForkServers, tmp_path: Path) -> None:
    source = random.Random(random.getrandbits(64) if thorough else 1)
    ones = [drawn(source) for _ in range(VERSIONS_IN_LONG_RUN if thorough else VERSIONS)]
    valid = list(accepted(ones))
    assert len(ones) / 10 < len(valid) < len(ones) * 9 / 10
    questions = []
    for one in valid:
        text = json.dumps(one.config, sort_keys=True)
        folder = tmp_path / sha256(text.encode()).hexdigest()
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(text)
        questions.append({"parse": server_options(one, folder)})
    argv = [str(install(CACHE, print)), "-m", MODULE, *written_questions(questions, tmp_path)]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    process = fork_servers.run(argv, environment, tmp_path / "output")
    assert process.wait(PARSE_LIMIT_S) == 0, (tmp_path / "output").read_text()[-2000:]
    refused = [
        (answer["refusal"], one.machine.name, one.version.parallelism, one.version.engine_options)
        for one, answer in zip(valid, read_answers(tmp_path), strict=True)
        if answer["refusal"]
    ]
    assert not refused, refused[:5]
