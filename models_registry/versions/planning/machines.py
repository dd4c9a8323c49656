"""The instance types that cells are made of, with public prices, power ratings and emissions and their sources; and how
a cell is split over machines: reads the degrees of a version, fills in defaults and rejects splits that an engine
cannot run. It is the only place that knows which tensor-parallel degree fits a machine. Figures of operators and
providers take precedence (`fleet.capacity.planning.rates`). Prices: US dollars per hour, on demand, Linux, us-east-1.
Watts: maximum sustained power. Emissions: grams of CO2 equivalent per kilowatt-hour of the grid, yearly average by
place, without offsets. Pure: it never chooses a split for a model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from datetime import date
from types import MappingProxyType
from typing import Any

from models_registry.versions.planning.spec import FieldReader, InvalidVersion, VersionSpec, not_served, one_of


@dataclass(frozen=True, slots=True)
class Dated:
    """Source of figures, and the date on which it was read."""

    read_on: date
    source: str


PRICES_FROM = Dated(
    date(2026, 1, 19),
    "https://github.com/aws/karpenter-provider-aws/blob/main/pkg/providers/pricing/zz_generated.pricing_aws.go",
)
"""Generated there from AWS's price list; Apache-2.0. It lacks Trainium2."""

ON_DEMAND: Mapping[str, float] = {
    "c7i.2xlarge": 0.357, "g4dn.xlarge": 0.526, "g4dn.12xlarge": 3.912, "g5.xlarge": 1.006, "g5.12xlarge": 5.672,
    "g5.48xlarge": 16.288, "g6.xlarge": 0.8048, "g6.12xlarge": 4.6016, "g6.48xlarge": 13.3504, "g6e.xlarge": 1.861,
    "g6e.12xlarge": 10.49264, "g6e.48xlarge": 30.13118, "inf1.xlarge": 0.228, "inf1.24xlarge": 4.721,
    "inf2.xlarge": 0.7582, "inf2.8xlarge": 1.96786, "inf2.24xlarge": 6.49063, "inf2.48xlarge": 12.98127,
    "p4d.24xlarge": 21.957642, "p4de.24xlarge": 27.44705, "p5.4xlarge": 6.88, "p5.48xlarge": 55.04,
    "p5en.48xlarge": 63.296, "p6-b200.48xlarge": 113.9328, "trn1.2xlarge": 1.34375, "trn1.32xlarge": 21.5,
    "trn1n.32xlarge": 24.78,
}  # fmt: skip

CHIP_WATTS: Mapping[str, float] = {"h100": 700, "h200": 700, "b200": 1000, "a100": 400, "l40s": 350, "l4": 72}
"""By accelerator, from NVIDIA's data sheets, "Max thermal design power", of SXM modules if there are any; read on
2026-11-26. AWS publishes no figures for its chips: their power draw is unknown until an operator states it."""

VCPU_WATTS, VCPU_IDLE_WATTS = 3.5, 0.74
"""Per vCPU of a machine without accelerators, at full load and idle. Cloud Carbon Footprint, "Methodology", average of
AWS's processors by SPECpower; read on 2026-11-26."""
IDLE_SHARE = VCPU_IDLE_WATTS / VCPU_WATTS
"""Share of its maximum that an idle machine draws."""

DGX_WATTS = 10_200
"""NVIDIA DGX H100 and H200, data sheets, "System power usage": a whole machine with eight modules; read on 2026-11-26.
AWS publishes no figures for its machines."""

MACHINE_WATTS: Mapping[str, float] = {
    "local.cpu": VCPU_WATTS,
    "c7i.2xlarge": 8 * VCPU_WATTS,
    "g6.12xlarge": 4 * CHIP_WATTS["l4"] + 48 * VCPU_WATTS,
    "p5.48xlarge": DGX_WATTS,
    "p5en.48xlarge": DGX_WATTS,
}

GRIDS_FROM = Dated(
    date(2026, 11, 26),
    "https://github.com/cloud-carbon-footprint/cloud-carbon-footprint (EPA eGRID 2020, EEA, carbonfootprint.com)",
)
GRIDS: Mapping[str, float] = {
    "us-east-1": 379.069, "us-east-2": 410.608, "us-west-1": 322.167, "us-west-2": 322.167, "us-gov-east-1": 379.069,
    "us-gov-west-1": 322.167, "af-south-1": 900.6, "ap-east-1": 710, "ap-south-1": 708.2, "ap-northeast-1": 465.8,
    "ap-northeast-2": 415.6, "ap-northeast-3": 465.8, "ap-southeast-1": 408, "ap-southeast-2": 760,
    "ap-southeast-3": 717.7, "ca-central-1": 120, "cn-north-1": 537.4, "cn-northwest-1": 537.4, "eu-central-1": 311,
    "eu-north-1": 8.8, "eu-south-1": 213.4, "eu-west-1": 278.6, "eu-west-2": 225, "eu-west-3": 51.1,
    "me-central-1": 404.1, "me-south-1": 505.9, "sa-east-1": 61.7,
}  # fmt: skip
GRID_ANYWHERE = 392.782
"""Average of the same source, for places without an entry."""

OVERHEADS_FROM = Dated(date(2026, 11, 26), "AWS, Sustainability Report 2024, power usage effectiveness by region")
OVERHEADS: Mapping[str, float] = {
    "eu-north-1": 1.1, "eu-west-1": 1.11, "us-west-2": 1.12, "us-east-2": 1.13, "us-east-1": 1.15, "sa-east-1": 1.17,
    "us-west-1": 1.18, "ca-central-1": 1.19, "af-south-1": 1.24, "cn-north-1": 1.25, "cn-northwest-1": 1.25,
    "ap-northeast-1": 1.27, "me-central-1": 1.27, "ap-southeast-1": 1.32, "me-south-1": 1.33, "eu-central-1": 1.35,
    "ap-southeast-3": 1.4, "ap-south-1": 1.42,
}  # fmt: skip
"""Power usage effectiveness: energy of a data centre per unit of energy that its machines use."""
OVERHEAD_ANYWHERE = 1.15
"""AWS's average, from the same report."""


@dataclass(frozen=True, slots=True)
class InstanceShape:
    """One instance type.

    `cores` are the accelerator's units that run one rank each (NeuronCores, GPUs; the whole machine if it is a CPU), 0
    if unknown. `tensor_parallel_degree` is the default per machine. `memory_gib` is the accelerators' memory,
    `price_per_hour` US dollars on demand in us-east-1, `watts` the maximum sustained power of the whole machine; both
    are 0 if no list has one (`machine_rates`)."""

    name: str
    accelerator: str
    chips: int = 0
    cores: int = 0
    memory_gib: float = 0
    price_per_hour: float = 0
    watts: float = 0
    tensor_parallel_degree: int = 1


LOCAL_CPU = "local.cpu"

_SHAPES = (
    InstanceShape(LOCAL_CPU, "cpu", cores=1, memory_gib=4),
    # https://aws.amazon.com/ec2/instance-types/trn1/: 1 or 16 Trainium chips of 2 NeuronCores and 32 GiB.
    InstanceShape("trn1.2xlarge", "trainium", 1, 2, 32, tensor_parallel_degree=2),
    InstanceShape("trn1.32xlarge", "trainium", 16, 32, 512, tensor_parallel_degree=32),
    # https://aws.amazon.com/ec2/instance-types/trn2/: 16 Trainium2 chips of 8 NeuronCores and 96 GiB. By default a rank
    # has a logical core of two (https://awsdocs-neuron.readthedocs-hosted.com, "Logical NeuronCore configuration").
    InstanceShape("trn2.48xlarge", "trainium2", 16, 64, 1536, tensor_parallel_degree=64),
    # https://aws.amazon.com/ec2/instance-types/inf2/: 12 Inferentia2 chips of 2 NeuronCores and 32 GiB.
    InstanceShape("inf2.48xlarge", "inferentia2", 12, 24, 384, tensor_parallel_degree=24),
    # https://aws.amazon.com/ec2/instance-types/p5/: 8 H100 of 80 GB.
    InstanceShape("p5.48xlarge", "h100", 8, 8, 640, tensor_parallel_degree=8),
    # The same page: 8 H200 of 141 GB.
    InstanceShape("p5en.48xlarge", "h200", 8, 8, 1128, tensor_parallel_degree=8),
    # https://aws.amazon.com/ec2/instance-types/g6/: 4 L4 of 24 GB.
    InstanceShape("g6.12xlarge", "l4", 4, 4, 96, tensor_parallel_degree=4),
    # https://aws.amazon.com/ec2/instance-types/c7i/: for ingresses. A missing accelerator alone does not identify one.
    InstanceShape("c7i.2xlarge", "none", cores=1, memory_gib=16),
)

INSTANCE_TYPES: Mapping[str, InstanceShape] = MappingProxyType(
    {
        shape.name: replace(
            shape, price_per_hour=ON_DEMAND.get(shape.name, 0.0), watts=MACHINE_WATTS.get(shape.name, 0.0)
        )
        for shape in _SHAPES
    }
)


@dataclass(frozen=True, slots=True)
class Degrees:
    """The split of one cell. Every degree counts over the whole cell.

    `nodes` machines; `tp` tensor-parallel ranks; `cp` context parallelism of prefill and `dp` data parallelism of
    decode, which both divide the tensor-parallel ranks; `pp` pipeline stages."""

    nodes: int = 1
    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks in the cell, one accelerator core each."""
        return self.tp * self.pp

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on every node; valid only for checked degrees."""
        return self.world_size // self.nodes


NAMES = tuple(field.name for field in fields(Degrees))
WITHIN = "within"
"""Stated next to the degrees: how many network nodes, counted from the widest, the machines of a cell must share (EC2
names three or four). Default: any."""
WITHIN_MAX = 8


def stated_degrees(reference: str, parallelism: Mapping[str, Mapping[str, Any]], instance_type: str) -> dict[str, int]:
    """The degrees that a version states for this instance type, without defaults. Raises InvalidVersion if the version
    does not name this instance type, or a degree is invalid."""
    stated = parallelism.get(instance_type)
    if stated is None:
        raise not_served(reference, parallelism, instance_type)
    read = FieldReader(f"{reference}: parallelism.{instance_type}", stated)
    known = (*NAMES, WITHIN)
    for name in stated:
        if name not in known:
            raise InvalidVersion(f"{reference}: parallelism.{instance_type} names {name!r}; {one_of(known, name)}")
    stated_within(reference, parallelism, instance_type)
    return {name: read.whole(name) for name in stated if name != WITHIN}


def stated_within(reference: str, parallelism: Mapping[str, Mapping[str, Any]], instance_type: str) -> int:
    """How many network nodes the machines of a cell must share, 0 if not stated. Raises InvalidVersion if it is not a
    whole number from 1 to `WITHIN_MAX`."""
    read = FieldReader(f"{reference}: parallelism.{instance_type}", parallelism.get(instance_type, {}))
    levels = read.whole(WITHIN, default=0)
    if levels > WITHIN_MAX:
        raise read.wrong(WITHIN, f"it must be from 1 to {WITHIN_MAX}, or left out if nodes may be anywhere")
    return levels


def degrees_on(reference: str, parallelism: Mapping[str, Mapping[str, Any]], machine: InstanceShape) -> Degrees:
    """The degrees of a cell of these machines. Default of `tp`: the machine's degree times the nodes, over `pp`. Raises
    InvalidVersion if the version does not name this instance type, or a degree is invalid."""
    stated = stated_degrees(reference, parallelism, machine.name)
    suited = machine.tensor_parallel_degree * stated.get("nodes", 1)
    return Degrees(**{"tp": max(1, suited // stated.get("pp", 1)), **stated})


DEGREES = ("nodes", "tp", "cp", "dp", "pp")
NEURON_RANKS_PER_NODE: Mapping[str, tuple[int, ...]] = {
    "trainium": (1, 2, 8, 16, 32),
    "trainium2": (1, 2, 4, 8, 16, 32, 64),
    "inferentia2": (1, 2, 4, 8, 24),
}
"""Ranks per machine that the Neuron runtime's collectives support, by accelerator. Source: https://awsdocs-
neuron.readthedocs-hosted.com/en/latest/libraries/nxd-inference/developer_guides/feature-guide.html (tensor-parallelism
support)."""


def check_degrees(spec: VersionSpec, degrees: Degrees, machine: InstanceShape) -> tuple[str, ...]:
    """Check that the engine can run the split; returns warnings about allowed degrees.

    `sim` computes nothing and accepts any degrees. Values that a machine or model does not state are not checked.
    Raises InvalidVersion if it cannot, and names the first broken rule."""
    if spec.engine == "sim":
        return ()
    rules = _Rules(spec, degrees, machine)
    if spec.engine in ("generic", "llama-cpp"):
        rules.check_one_process()
        return ()
    rules.check_cores()
    if spec.engine == "neuron":
        rules.check_neuron()
        return tuple(rules.neuron_notes())
    rules.check_vllm()
    return ()


class _Rules:
    def __init__(self, spec: VersionSpec, degrees: Degrees, machine: InstanceShape) -> None:
        self.spec, self.degrees, self.machine = spec, degrees, machine

    def broken(self, name: str, rule: str) -> InvalidVersion:
        value = getattr(self.degrees, name)
        return InvalidVersion(f"{self.spec.reference}: parallelism.{self.machine.name}.{name} is {value}; {rule}")

    def check_cores(self) -> None:
        degrees, cores = self.degrees, self.machine.cores
        if degrees.world_size % degrees.nodes:
            raise self.broken(
                "tp",
                (
                    f"every node has the same number of ranks, so tp x pp = {degrees.world_size} must be a "
                    f"multiple of nodes = {degrees.nodes}"
                ),
            )
        if cores and degrees.ranks_per_node > cores:
            raise self.broken(
                "tp",
                f"tp x pp = {degrees.world_size} ranks on {degrees.nodes} x {cores} cores of {self.machine.name} do "
                f"not fit: at most {degrees.nodes * cores}, or nodes = {-(-degrees.world_size // cores)}",
            )

    def check_one_process(self) -> None:
        """These engines are one process on one node, which manages the node's devices itself."""
        for name, value in self.spec.parallelism.get(self.machine.name, {}).items():
            if name in DEGREES and value != 1:
                raise self.broken(name, f"engine {self.spec.engine} runs one process on one node, so it must be 1")

    def check_vllm(self) -> None:
        degrees, heads = self.degrees, self.spec.heads
        if self.machine.accelerator in NEURON_RANKS_PER_NODE:
            raise InvalidVersion(
                f"{self.spec.reference}: engine is 'vllm'; it does not run on {self.machine.accelerator} of "
                f"{self.machine.name}, engine neuron does"
            )
        if degrees.cp > 1:
            raise self.broken("cp", "context parallelism needs engine neuron; on engine vllm it must be 1")
        if degrees.dp > 1:
            raise self.broken("dp", "engine vllm supports 1: add cells to the deployment for more replicas")
        self._check_executor_over_nodes()
        if heads.attention is not None and heads.attention % degrees.tp:
            raise self.broken("tp", f"it must divide {heads.attention} attention heads: {self._fitting_degrees()}")
        if heads.kv is not None and heads.kv % degrees.tp and degrees.tp % heads.kv:
            raise self.broken("tp", f"it must divide {heads.kv} KV heads or be a multiple: {self._fitting_degrees()}")
        if heads.layers is not None and degrees.pp > heads.layers:
            raise self.broken("pp", f"every stage needs a layer, so it must be at most {heads.layers}")

    def _check_executor_over_nodes(self) -> None:
        """Over several nodes Switchyard's executor drives equally many workers on each, tensor-parallel across all of
        them or in pipeline stages (`engine_agent.engines.vllm.executor`). On one node vLLM's own drives them."""
        degrees, ranks = self.degrees, self.degrees.ranks_per_node
        if degrees.nodes == 1 or degrees.pp == 1:
            return
        if degrees.tp % ranks and ranks % degrees.tp:
            raise self.broken(
                "tp",
                f"over several nodes a pipeline stage is whole nodes or a part of one, so it must divide the {ranks} "
                "ranks of a node or be a multiple of them",
            )
        if self.spec.speculation:
            rule = "over several nodes engine vllm does not support pipeline stages with speculation"
            raise self.broken("pp", f"{rule}, so it must be 1, or nodes = 1, or speculation must be left out")

    def _fitting_degrees(self) -> str:
        heads, pp = self.spec.heads, self.degrees.pp
        attention = heads.attention or heads.kv or 1
        kv = heads.kv or attention
        most = self.degrees.nodes * self.machine.cores // pp if self.machine.cores else attention
        fitting = [
            tp
            for tp in range(1, min(attention, most) + 1)
            if attention % tp == 0 and (kv % tp == 0 or tp % kv == 0) and tp * pp % self.degrees.nodes == 0
        ]
        if not fitting:
            return f"no value fits {self.degrees.nodes} nodes; pad the heads or change nodes"
        return f"use one of {', '.join(map(str, fitting))}"

    def check_neuron(self) -> None:
        """The rules of NxDI's NeuronConfig (`validate_attention_data_parallel` and around it)."""
        degrees, batch = self.degrees, self.spec.max_concurrency
        ranks = NEURON_RANKS_PER_NODE.get(self.machine.accelerator)
        if ranks is None:
            raise InvalidVersion(
                f"{self.spec.reference}: engine is 'neuron'; {self.machine.name} has {self.machine.accelerator}, and "
                f"it runs on {', '.join(NEURON_RANKS_PER_NODE)}"
            )
        if degrees.ranks_per_node not in ranks:
            listed = ", ".join(map(str, ranks))
            raise self.broken(
                "tp",
                (
                    f"that is {degrees.ranks_per_node} ranks per node, and collectives of "
                    f"{self.machine.accelerator} support {listed}"
                ),
            )
        if degrees.tp % degrees.cp:
            raise self.broken("cp", f"it must divide tp = {degrees.tp}")
        if degrees.tp % degrees.dp:
            raise self.broken("dp", f"it must divide tp = {degrees.tp}")
        if degrees.dp > 1 and batch < 2:
            raise self.broken("dp", f"it needs continuous batching, so max_concurrency must be over 1, not {batch}")
        if batch % degrees.dp:
            raise self.broken("dp", f"it must divide max_concurrency = {batch}, the batch that it shares out")
        if degrees.cp > 1 and degrees.dp > 1 and degrees.cp % degrees.dp:
            raise self.broken("dp", f"if both are over 1 it must divide cp = {degrees.cp}")
        self._check_kv_heads_of_decode()
        if self.spec.heads.attention is not None and degrees.tp > self.spec.heads.attention:
            raise self.broken(
                "tp", f"the model has {self.spec.heads.attention} attention heads; more ranks would be idle"
            )

    def _check_kv_heads_of_decode(self) -> None:
        """A rank writes the KV heads in prefill that it reads in decode (`validate_tp_prefill_to_dp_decode` of NxDI's
        modules/attention/utils.py; with `cp` and a different `dp`, `get_kv_head_indices_context_parallel_dp_decode`).
        """
        degrees, kv = self.degrees, self.spec.heads.kv
        if kv is None or degrees.dp in (1, degrees.cp):
            return
        decode = max(kv // (degrees.tp // degrees.dp), 1)
        prefill = max(kv // degrees.tp, 1)
        if degrees.cp == 1 and decode != prefill:
            rule = (
                f"each rank has {decode} of {kv} KV heads in decode and {prefill} in prefill, which NxDI does "
                "not convert"
            )
            raise self.broken("dp", f"{rule}; it must be less, or tp more")
        if degrees.cp > 1 and degrees.tp // degrees.dp < kv:
            rule = f"with a different cp, tp / dp must be at least {kv}, the model's KV heads"
            raise self.broken("dp", f"{rule}; it is {degrees.tp // degrees.dp}")

    def neuron_notes(self) -> Iterator[str]:
        """Warnings: NxDI pads attention heads and copies KV heads if degrees do not divide them. Both cost memory."""
        heads, tp = self.spec.heads, self.degrees.tp
        if heads.attention is not None and heads.attention % tp:
            padded = -(-heads.attention // tp) * tp
            yield f"tp = {tp} does not divide {heads.attention} attention heads: NxDI pads them to {padded}"
        if heads.kv is not None and heads.kv not in {heads.attention, tp}:
            if tp % heads.kv == 0:
                yield f"{heads.kv} KV heads on tp = {tp}: NxDI keeps {tp // heads.kv} copies of each"
            else:  # fewer ranks than KV heads included: `determine_sharding_strategy` of its modules/attention/gqa.py
                yield (
                    f"tp = {tp} is not a multiple of {heads.kv} KV heads: NxDI gives every attention head its own copy"
                )
