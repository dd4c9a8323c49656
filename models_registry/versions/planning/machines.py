"""How a cell is split over machines: reads the degrees of a version, fills in defaults and rejects splits that an
engine cannot run. Pure: it never chooses a split for a model. `models_registry.instance_types` describes machines."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from models_registry.instance_types.planner import NEURON, NVIDIA, InstanceShape
from models_registry.versions.planning.spec import FieldReader, InvalidVersion, VersionSpec, not_served, one_of


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


def is_neuron(machine: InstanceShape) -> bool:
    """Whether its accelerators are AWS's, also those that engine neuron does not support, such as Inf1."""
    return machine.vendor == NEURON or machine.accelerator in NEURON_RANKS_PER_NODE


def check_degrees(spec: VersionSpec, degrees: Degrees, machine: InstanceShape) -> tuple[str, ...]:
    """Check that the engine can run the split; returns warnings about allowed degrees.

    `sim` computes nothing and accepts any degrees. Values that a machine or model does not state are not checked.
    Raises InvalidVersion if it cannot, and names the first broken rule."""
    if spec.engine == "sim":
        return ()
    rules = _Rules(spec, degrees, machine)
    if spec.engine in ("generic", "llama-cpp", "triton"):
        rules.check_one_process()
        return ()
    rules.check_cores()
    if spec.engine in ("sglang", "tensorrt-llm"):
        rules.check_cuda()
        return ()
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

    def check_cuda(self) -> None:
        """SGLang starts one server on each node, which share ranks and stages; TensorRT-LLM's nodes are started by
        `mpirun`, which agents do not run."""
        degrees, engine = self.degrees, self.spec.engine
        if self.machine.vendor != NVIDIA:
            raise InvalidVersion(
                f"{self.spec.reference}: engine is {engine!r}; it runs on GPUs of NVIDIA, and {self.machine.name} has "
                f"{self.machine.accelerator}"
            )
        self._check_tp_and_pp_only()
        if engine == "tensorrt-llm" and degrees.nodes > 1:
            raise self.broken("nodes", "engine tensorrt-llm needs mpirun over several nodes, so it must be 1")
        if max(degrees.pp, degrees.nodes) % min(degrees.pp, degrees.nodes):
            raise self.broken("pp", f"a stage is whole nodes, or a node whole stages: {degrees.nodes} nodes do not fit")
        self._check_heads()

    def check_vllm(self) -> None:
        if is_neuron(self.machine):
            raise InvalidVersion(
                f"{self.spec.reference}: engine is 'vllm'; it does not run on {self.machine.accelerator} of "
                f"{self.machine.name}, engine neuron does"
            )
        self._check_tp_and_pp_only()
        self._check_executor_over_nodes()
        self._check_heads()

    def _check_tp_and_pp_only(self) -> None:
        engine = self.spec.engine
        if self.degrees.cp > 1:
            raise self.broken("cp", f"context parallelism needs engine neuron; on engine {engine} it must be 1")
        if self.degrees.dp > 1:
            raise self.broken("dp", f"engine {engine} supports 1: add cells to the deployment for more replicas")

    def _check_heads(self) -> None:
        degrees, heads = self.degrees, self.spec.heads
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
