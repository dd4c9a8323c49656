"""Which splits an engine can run on which machines: refuses the others, naming field, value, rule and what would do.

Pure. It knows what divides what; it neither chooses degrees nor renders them.
"""

from collections.abc import Iterator, Mapping

from models_registry.planning.instance_types import InstanceShape
from models_registry.planning.parallelism import Degrees
from models_registry.planning.version_spec import InvalidVersion, VersionSpec

DEGREES = ("nodes", "tp", "cp", "dp", "pp")
NEURON_RANKS_PER_NODE: Mapping[str, tuple[int, ...]] = {
    "trainium": (1, 2, 8, 16, 32),
    "trainium2": (1, 2, 4, 8, 16, 32, 64),
    "inferentia2": (1, 2, 4, 8, 24),
}
"""Ranks on one machine that the Neuron runtime's collectives take, by accelerator. Source:
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/libraries/nxd-inference/developer_guides/feature-guide.html
(tensor-parallelism support)."""


def check_degrees(spec: VersionSpec, degrees: Degrees, machine: InstanceShape) -> tuple[str, ...]:
    """Check that the engine can run the split; returns what is allowed but worth knowing, as sentences.

    `sim` computes nothing, so any degrees go; what a machine or model has not stated is not checked.

    Raises:
        InvalidVersion: it cannot; the first broken rule.
    """
    if spec.engine == "sim":
        return ()
    rules = _Rules(spec, degrees, machine)
    if spec.engine == "generic":
        rules.check_generic()
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
                f"every node takes as many ranks, so tp x pp = {degrees.world_size} must be a multiple of "
                f"nodes = {degrees.nodes}",
            )
        if cores and degrees.ranks_per_node > cores:
            raise self.broken(
                "tp",
                f"tp x pp = {degrees.world_size} ranks on {degrees.nodes} x {cores} cores of {self.machine.name} do "
                f"not fit: at most {degrees.nodes * cores}, or nodes = {-(-degrees.world_size // cores)}",
            )

    def check_generic(self) -> None:
        """A program of others is one process on one node; what it does with the node's devices is its own."""
        for name, value in self.spec.parallelism.get(self.machine.name, {}).items():
            if name in DEGREES and value != 1:
                raise self.broken(name, "engine generic runs one process on one node, so it must be 1")

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
            raise self.broken("dp", "engine vllm takes 1: more replicas are more cells of the deployment")
        self._check_executor_over_nodes()
        if heads.attention is not None and heads.attention % degrees.tp:
            raise self.broken("tp", f"it must divide {heads.attention} attention heads: {self._fitting_degrees()}")
        if heads.kv is not None and heads.kv % degrees.tp and degrees.tp % heads.kv:
            raise self.broken("tp", f"it must divide {heads.kv} KV heads or be a multiple: {self._fitting_degrees()}")
        if heads.layers is not None and degrees.pp > heads.layers:
            raise self.broken("pp", f"every stage needs a layer, so it must be at most {heads.layers}")

    def _check_executor_over_nodes(self) -> None:
        """Over several nodes our executor drives one worker a node, each a rank of one tensor-parallel group
        (`engine_agent.engines.vllm.cell.worker.place_worker`): a cell of other degrees ends at its start. On one node
        vLLM's own executor drives all devices."""
        nodes = self.degrees.nodes
        if nodes == 1:
            return
        if self.degrees.pp > 1:
            rule = "over several nodes engine vllm has no pipeline stages yet, so it must be 1, or nodes = 1"
            raise self.broken("pp", rule)
        if self.degrees.tp != nodes:
            rule = f"over several nodes engine vllm drives one device a node yet, so it must be {nodes}, or nodes = 1"
            raise self.broken("tp", rule)

    def _fitting_degrees(self) -> str:
        heads, pp = self.spec.heads, self.degrees.pp
        attention = heads.attention or heads.kv or 1
        kv = heads.kv or attention
        most = self.degrees.nodes * self.machine.cores // pp if self.machine.cores else attention
        fitting = [
            tp
            for tp in range(1, min(attention, most) + 1)
            if attention % tp == 0 and (kv % tp == 0 or tp % kv == 0) and self.degrees.nodes in (1, tp)
        ]
        if not fitting:
            return f"none does on {self.degrees.nodes} nodes; pad the heads or change nodes"
        return f"{', '.join(map(str, fitting))} would do"

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
                f"that is {degrees.ranks_per_node} ranks a node, and collectives of {self.machine.accelerator} take "
                f"{listed}",
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
            raise self.broken("dp", f"where both are over 1 it must divide cp = {degrees.cp}")
        self._check_kv_heads_of_decode()
        if self.spec.heads.attention is not None and degrees.tp > self.spec.heads.attention:
            raise self.broken("tp", f"the model has {self.spec.heads.attention} attention heads; more ranks would idle")

    def _check_kv_heads_of_decode(self) -> None:
        """A rank writes in prefill the KV heads that it reads in decode (`validate_tp_prefill_to_dp_decode` of NxDI's
        modules/attention/utils.py); with `cp` and another `dp`, one of them
        (`get_kv_head_indices_context_parallel_dp_decode`)."""
        degrees, kv = self.degrees, self.spec.heads.kv
        if kv is None or degrees.dp in (1, degrees.cp):
            return
        decode = max(kv // (degrees.tp // degrees.dp), 1)
        prefill = max(kv // degrees.tp, 1)
        if degrees.cp == 1 and decode != prefill:
            rule = (
                f"{kv} KV heads are {decode} on a rank in decode and {prefill} in prefill, which NxDI does not convert"
            )
            raise self.broken("dp", f"{rule}; it must be less, or tp more")
        if degrees.cp > 1 and degrees.tp // degrees.dp < kv:
            rule = f"beside another cp, tp / dp must be {kv} or more, the model's KV heads"
            raise self.broken("dp", f"{rule}; it is {degrees.tp // degrees.dp}")

    def neuron_notes(self) -> Iterator[str]:
        """NxDI pads attention heads and copies KV heads where degrees do not divide them; both cost memory."""
        heads, tp = self.spec.heads, self.degrees.tp
        if heads.attention is not None and heads.attention % tp:
            padded = -(-heads.attention // tp) * tp
            yield f"tp = {tp} does not divide {heads.attention} attention heads: NxDI pads them to {padded}"
        if heads.kv is not None and heads.kv not in {heads.attention, tp}:
            if tp % heads.kv == 0:
                yield f"{heads.kv} KV heads on tp = {tp}: NxDI keeps {tp // heads.kv} copies of each"
            else:  # fewer ranks than KV heads included: `determine_sharding_strategy` of its modules/attention/gqa.py
                yield f"tp = {tp} is no multiple of {heads.kv} KV heads: NxDI gives every attention head its own copy"
