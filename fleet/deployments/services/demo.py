"""Seeds the demo fleet of `make up`. Running it again never changes what an operator has changed."""

import re
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

from django.db import transaction

from fleet.capacity.planning.rates import RateKind
from fleet.capacity.services import rate_set
from fleet.deployments.models import Deployment, DeploymentRegion
from fleet.regions.models import Rate, Region
from models_registry.instance_types.planner import INSTANCE_TYPES, LOCAL_CPU
from models_registry.instance_types.services import instance_types_ship
from models_registry.speculation.planner import choose, read_calibration, read_step_cost, task_figures
from models_registry.speculation.services import calibration_store
from models_registry.versions.models import Model, ModelVersion, VersionState
from models_registry.versions.services.drafts import version_register

LOCAL = LOCAL_CPU
REGIONS = ("us-east-1", "us-west-2")

CELLS: dict[str, dict[str, dict[str, int]]] = {
    "local": {"smollm2": {REGIONS[0]: 1}, "sim-70b": dict.fromkeys(REGIONS, 2)},
    "machines": {"sim-70b": dict.fromkeys(REGIONS, 1)},
    "aws": {},
}
"""Provider of the demo's regions -> deployment -> region -> cells. Where hosts join, four per region leave two for
repairs. Cloud regions and their deployments are created by the operator."""
TYPES = {"aws": "trn1.32xlarge"}
"""Instance type per provider, if not `LOCAL`."""

LOCAL_PRICE = Decimal("0.045")
"""US dollars an hour of a local machine, so that Cost shows money: a vCPU of a c7i.2xlarge (`shipped.csv`)."""

# Prompts with a deterministic answer, of the real weights and of the simulator.
GOLDEN_SMOLLM2 = [{"prompt": "The capital of France is", "expect": "Paris"}]
GOLDEN_SIM = [{"prompt": "What is the capital of France?", "expect": "Paris"}]

SIM_70B: dict[str, Any] = {
    "prefill_tokens_per_s": 8000,
    "decode_step_ms": 14,
    "decode_step_per_seq_ms": 0.4,
    "kv_capacity_tokens": 400000,
    "load_time_s": 3,
    "seed": 7,
}
# Versions to roll out: a better one, and unreleased ones that the gate must reject.
SIM_70B_FASTER: dict[str, Any] = {**SIM_70B, "decode_step_ms": 12.5}
SIM_70B_BAD: dict[str, dict[str, Any]] = {
    "bad-crash": {**SIM_70B, "fault": '{"kind":"crash"}'},
    "bad-slow": {**SIM_70B, "decode_step_ms": 21, "decode_step_per_seq_ms": 0.6},
    "bad-answer": {**SIM_70B, "fault": '{"kind":"wrong_answer"}'},
}
DEMO_POLICY: dict[str, Any] = {"min_healthy_s": 5, "canary_bake_s": 10, "bake_s": 10}
"""Minutes become seconds, so that a rollout can be watched."""
SURGE_POLICY: dict[str, Any] = {**DEMO_POLICY, "strategy": "surge", "surge": 1}
"""For a deployment of one cell, which must not go down during a rollout."""

SMOLLM2_VLLM: dict[str, Any] = {
    "enforce_eager": True,
    # CPUs round 16-bit sums differently, so a small model's text differs between machines. 32 bits avoid that for twice
    # the memory: 270 MB more of weights per cell, and 128 MiB more of cache per rank.
    "dtype": "float32",
    "kv_cache_memory_bytes": 268435456,
    # Makes required tool calls fit their schema even from a model that was not trained for tools. Without it,
    # the engine enforces only schemas with `"strict": true`, which few clients send.
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "tool_strict_level": "parameter",
    # The authors' recommendation for chat. The engine's default of 1.0 makes a small model ramble.
    "override_generation_config": '{"temperature": 0.2, "top_p": 0.9}',
}
SMOLLM2_LLAMA_CPP: dict[str, Any] = {"cache_prompt": True, "temperature": 0.2, "top_p": 0.9}
SMOLLM2_TRITON: dict[str, Any] = {"temperature": 0.2, "top_p": 0.9}
SMOLLM2_SIM: dict[str, Any] = {
    "prefill_tokens_per_s": 4000,
    "decode_step_ms": 20,
    "decode_step_per_seq_ms": 1,
    "kv_capacity_tokens": 32768,
    "load_time_s": 2,
    "seed": 11,
}

# A second version of each, for operators to roll out: the same model with a lower temperature.
SMOLLM2_VLLM_CALM = {**SMOLLM2_VLLM, "override_generation_config": '{"temperature": 0.1, "top_p": 0.9}'}
SMOLLM2_LLAMA_CPP_CALM = {**SMOLLM2_LLAMA_CPP, "temperature": 0.1}
SMOLLM2_TRITON_CALM = {**SMOLLM2_TRITON, "temperature": 0.1}
SMOLLM2_SIM_CALM = {**SMOLLM2_SIM, "seed": 12}

SEEDED = re.compile(r"sim|135m-(fp32-|q4-|triton-)?[0-9a-f]{8}")
"""Names of smollm2 versions that the demo may exchange for each other. Names without `fp32` or `q4` are 16-bit versions
of earlier releases."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Medusa heads for the demo's SmolLM2 that were trained on this machine, with their calibration. `step_cost` is
    None if step times were not measured."""

    uri: str
    digest: str
    calibration: dict[str, Any]
    step_cost: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Weights:
    """Location of SmolLM2 as its `engine` reads it: `vllm` converted, the others as GGUF. Not needed with `sim`."""

    uri: str
    digest: str
    engine: str = "vllm"
    heads: Heads | None = None


def demo_seed(*, weights: Weights | None, ingress_port: int, now: datetime, provider: str = "local") -> None:
    """Creates regions, instance types, models, versions and deployments of the demo. Without `weights`, all use `sim`;
    with heads, there is also a version that speculates. `provider`: of new regions, a key of `CELLS`."""
    with transaction.atomic():
        instance_types_ship()
        for position, name in enumerate(REGIONS if CELLS[provider] else ()):
            url = f"http://127.0.0.1:{ingress_port + position}"
            defaults = {"position": position, "spares": {LOCAL: 1}, "provider": provider}
            region, _ = Region.objects.get_or_create(name=name, defaults=defaults)
            if region.ingress_url != url:
                Region.objects.filter(name=name).update(ingress_url=url)
        sim_70b = _sim_70b(TYPES.get(provider, LOCAL), now)
        versions = {"smollm2": (_smollm2(weights, now), SURGE_POLICY), "sim-70b": (sim_70b, DEMO_POLICY)}
        for deployment, cells in CELLS[provider].items():
            version, policy = versions[deployment]
            _create_deployment(deployment, version, cells, policy, now)
        if provider == "local" and not Rate.objects.filter(kind=RateKind.MACHINE_PRICE.value, subject=LOCAL).exists():
            rate_set(kind=RateKind.MACHINE_PRICE, subject=LOCAL, value=LOCAL_PRICE, actor="make up", now=now)


def _smollm2(weights: Weights | None, now: datetime) -> ModelVersion:
    model, _ = Model.objects.get_or_create(
        name="smollm2",
        defaults={"description": "SmolLM2-135M-Instruct, 135 million parameters", "created_at": now},
    )
    engine = "sim" if weights is None else weights.engine
    columns: dict[str, Any] = {"engine": engine}
    if weights is not None:
        columns |= {"artifact_uri": weights.uri, "artifact_digest": weights.digest}
    if engine == "vllm":  # padded from 9 and 3, which two ranks cannot share
        columns |= {"attention_heads": 12, "kv_heads": 4, "layers": 30}
    machines = {LOCAL: {"nodes": 2, "tp": 2}}
    if engine in ("llama-cpp", "triton"):
        columns |= {"max_concurrency": 4}
        machines = {LOCAL: {"nodes": 1}}
    prefix = {"vllm": "135m-fp32-", "llama-cpp": "135m-q4-", "triton": "135m-triton-"}.get(engine, "")
    name = "sim" if weights is None else prefix + _short_digest(weights.digest)
    options, calm = {
        "vllm": (SMOLLM2_VLLM, SMOLLM2_VLLM_CALM),
        "llama-cpp": (SMOLLM2_LLAMA_CPP, SMOLLM2_LLAMA_CPP_CALM),
        "sim": (SMOLLM2_SIM, SMOLLM2_SIM_CALM),
        "triton": (SMOLLM2_TRITON, SMOLLM2_TRITON_CALM),
    }[engine]

    def version(name: str, options: dict[str, Any]) -> ModelVersion:
        return _register_version(model, name, machines, now, context_length=2048, engine_options=options, **columns)

    version(f"{name}-calm", calm)
    if weights is not None and weights.heads is not None:
        _with_heads(model, f"{name}-medusa-{_short_digest(weights.heads.digest)}", weights.heads, columns, now)
    return version(name, options)


def _short_digest(digest: str) -> str:
    return digest.removeprefix("sha256:")[:8]


def _with_heads(model: Model, name: str, heads: Heads, columns: dict[str, Any], now: datetime) -> None:
    """A calibrated version that speculates with these heads as much as pays at each batch size."""
    if ModelVersion.objects.filter(model=model, version=name).exists():
        return
    speculation: dict[str, Any] = {"method": "medusa", "draft_uri": heads.uri, "draft_digest": heads.digest}
    speculation |= {"tokens": heads.calibration["heads"], "tokens_per_batch_size": _tokens_by_batch_size(heads)}
    row = _register_version(
        model,
        name,
        {LOCAL: {"nodes": 1, "tp": 1}},
        now,
        context_length=2048,
        engine_options=SMOLLM2_VLLM,
        speculation=speculation,
        **columns,
    )
    costs = [heads.step_cost] if heads.step_cost else []
    calibration_store(version_id=row.pk, document=heads.calibration, step_costs=costs, actor="switchyard", now=now)


def _tokens_by_batch_size(heads: Heads) -> list[list[int]]:
    """Batch sizes and guessed tokens. The mix of tasks is unknown, so the task that stops paying first counts. Without
    measured steps: on two cores, chat lost from batches of 4."""
    if heads.step_cost is None:
        return [[1, 3, heads.calibration["heads"]], [4, 4, 0]]
    cost = read_step_cost(heads.step_cost)
    tasks = read_calibration(heads.calibration).tasks
    chosen = [choose(task_figures(task), cost, is_tree=False) for task in tasks]
    first_off = min(chosen, key=lambda each: (each.off_from or cost.most_batch + 1, each.tokens))
    return [list(each) for each in first_off.ranges]


def _sim_70b(instance_type: str, now: datetime) -> ModelVersion:
    model, _ = Model.objects.get_or_create(
        name="sim-70b",
        defaults={"description": "A simulated 70-billion-parameter model on two nodes", "created_at": now},
    )

    def version(name: str, options: dict[str, Any], state: VersionState = VersionState.RELEASED) -> ModelVersion:
        return _register_version(
            model,
            name,
            {instance_type: {"nodes": 2, "tp": 1}},
            now,
            state=state,
            engine="sim",
            context_length=8192,
            max_concurrency=32,
            ready_timeout_s=90,
            engine_options=options,
        )

    first = version("1", SIM_70B)
    version("2", SIM_70B_FASTER)
    for name, options in SIM_70B_BAD.items():
        version(name, options, VersionState.VALIDATED)
    return first


def _register_version(
    model: Model, name: str, parallelism: dict[str, dict[str, int]], now: datetime, **columns: Any
) -> ModelVersion:
    state = columns.pop("state", VersionState.RELEASED)
    existing = ModelVersion.objects.filter(model=model, version=name).first()
    if existing is not None:
        if existing.state == VersionState.DRAFT:  # seeded by earlier releases
            ModelVersion.objects.filter(pk=existing.pk).update(state=state)
        return existing
    return version_register(
        model=model,
        version=name,
        machines=INSTANCE_TYPES,
        now=now,
        parallelism=parallelism,
        golden_prompts=GOLDEN_SIM if columns["engine"] == "sim" else GOLDEN_SMOLLM2,
        state=state,
        **columns,
    )


def _create_deployment(
    name: str, version: ModelVersion, cells: dict[str, int], policy: dict[str, Any], now: datetime
) -> None:
    deployment, created = Deployment.objects.get_or_create(
        name=name,
        defaults={
            "model_version": version,
            "instance_types": [LOCAL],
            "update_policy": policy,
            "created_at": now,
        },
    )
    if created:
        DeploymentRegion.objects.bulk_create(
            DeploymentRegion(deployment=deployment, region_id=region, cells=count) for region, count in cells.items()
        )
    elif deployment.model_version_id != version.pk and SEEDED.fullmatch(deployment.model_version.version):
        # `make up ENGINE=…` switched the engine. An operator's own version stays.
        Deployment.objects.filter(name=name).update(model_version=version)
