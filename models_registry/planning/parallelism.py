"""How one replica of a model is split over the machines of a cell: reads the degrees and fills in what is unsaid.

Pure. Whether an engine can run such a split is for `models_registry.planning.degree_rules`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from models_registry.planning.fields import FieldReader, one_of
from models_registry.planning.instance_types import InstanceShape
from models_registry.planning.version_spec import InvalidVersion, not_served


@dataclass(frozen=True, slots=True)
class Degrees:
    """The split of one cell. Every degree counts over the whole cell, not over one of its nodes.

    `nodes` machines; `tp` tensor-parallel ranks; `cp` context parallelism of prefill and `dp` data parallelism of
    decode, both of which share out the tensor-parallel ranks among themselves; `pp` pipeline stages.
    """

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
        """Number of ranks on every node, where the degrees allow a cell at all."""
        return self.world_size // self.nodes


NAMES = tuple(field.name for field in fields(Degrees))
WITHIN = "within"
"""Stated beside the degrees, as it follows from them: how many network nodes, counted from the widest, the machines of
a cell must share (EC2 names three or four). Unsaid: any."""
WITHIN_MAX = 8


def stated_degrees(reference: str, parallelism: Mapping[str, Mapping[str, Any]], instance_type: str) -> dict[str, int]:
    """The degrees that a version states for this instance type, without those it leaves to the defaults.

    Raises:
        InvalidVersion: the version says nothing about this instance type, or says nonsense.
    """
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
    """How many network nodes the machines of a cell must share, 0 where the version does not say.

    Raises:
        InvalidVersion: it is no whole number from 1 to `WITHIN_MAX`.
    """
    read = FieldReader(f"{reference}: parallelism.{instance_type}", parallelism.get(instance_type, {}))
    levels = read.whole(WITHIN, default=0)
    if levels > WITHIN_MAX:
        raise read.wrong(WITHIN, f"it must be from 1 to {WITHIN_MAX}, or left out where nodes may be anywhere")
    return levels


def degrees_on(reference: str, parallelism: Mapping[str, Mapping[str, Any]], machine: InstanceShape) -> Degrees:
    """The degrees of a cell of these machines. Unsaid, `tp` is what one machine suits times the nodes, over `pp`.

    Raises:
        InvalidVersion: the version says nothing about this instance type, or says nonsense.
    """
    stated = stated_degrees(reference, parallelism, machine.name)
    suited = machine.tensor_parallel_degree * stated.get("nodes", 1)
    return Degrees(**{"tp": max(1, suited // stated.get("pp", 1)), **stated})
