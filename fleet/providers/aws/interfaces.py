"""Which network interfaces an instance type is launched with. Pure: a table, and one rule from AWS's documentation.

The table is an extract of `DescribeInstanceTypes` (`instance_interfaces.json` names its source). Every machine of a
type gets the same interfaces, whatever it is for: a spare must fit into any cell.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from engine_agent.protocol.strict_json import strict_loads

TABLE = Path(__file__).with_name("instance_interfaces.json")


@dataclass(frozen=True, slots=True)
class InstanceNetwork:
    """What a type has. `efa_cards`: indices of the network cards that can have an EFA. `usage_classes`: in EC2's words,
    `on-demand`, `spot`, `capacity-block`."""

    cards: int
    efa_cards: tuple[int, ...]
    usage_classes: frozenset[str]


@dataclass(frozen=True, slots=True)
class Interface:
    """`kind`: in EC2's words. `interface` has an address, `efa-only` has none and speaks to other EFAs alone."""

    card: int
    device: int
    kind: str


@cache
def instance_networks() -> dict[str, InstanceNetwork]:
    rows: dict[str, dict[str, Any]] = strict_loads(TABLE.read_bytes())["instance_types"]
    return {
        name: InstanceNetwork(row["cards"], tuple(row["efa_cards"]), frozenset(row["usage_classes"]))
        for name, row in rows.items()
    }


def network_of(instance_type: str) -> InstanceNetwork:
    """What an instance type has.

    Raises:
        ValueError: it is not in the table.
    """
    found = instance_networks().get(instance_type)
    if found is None:
        raise ValueError(f"the network cards of {instance_type} are not known; add it to {TABLE.name}")
    return found


def interfaces_of(instance_type: str) -> tuple[Interface, ...]:
    """The interfaces of a machine: one with its address, and an EFA on each card that can have one.

    As "Maximize network bandwidth on Amazon EC2 instances with multiple network cards" has it
    (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html): card 0, device 0 is an `interface`;
    if card 0 can have an EFA, its device 1 is `efa-only`; each further card has an `efa-only` as device 0. Its example,
    32 EFAs and one address, is a P5's. It has another layout for P5 and P5e, of several addresses for more bandwidth of
    IP; a node has one address here. Older guides, such as Neuron's for trn1, use device 1 throughout and `efa` on card
    0. None of it was tried on hardware.

    Raises:
        ValueError: the type is not in the table.
    """
    efas = (Interface(card, 0 if card else 1, "efa-only") for card in network_of(instance_type).efa_cards)
    return (Interface(0, 0, "interface"), *efas)
