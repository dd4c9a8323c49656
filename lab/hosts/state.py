"""Topology and conditions as JSON, for the laboratory's own processes and for the next start of the same laboratory."""

from collections.abc import Mapping
from dataclasses import asdict
from ipaddress import IPv4Address
from typing import Any

from lab.hosts.conditions import Conditions, Cut, Lost, Slowness
from lab.hosts.topology import Host, Role, Topology


def write_state(topology: Topology, conditions: Conditions) -> dict[str, Any]:
    """What `read_state` reads."""
    guests = [{**asdict(guest), "address": str(guest.address)} for guest in topology.guests]
    return {
        "topology": {**asdict(topology), "guests": guests},
        "conditions": {**asdict(conditions), "off": sorted(conditions.off)},
    }


def read_state(state: Mapping[str, Any]) -> tuple[Topology, Conditions]:
    """What `write_state` wrote."""
    topology, conditions = dict(state["topology"]), state["conditions"]
    topology["regions"] = tuple(topology["regions"])
    topology["guests"] = tuple(_guest(each) for each in topology["guests"])
    cuts = tuple(Cut(each["name"], each["other"], Lost(each["lost"])) for each in conditions["cuts"])
    slow = {name: Slowness(**how) for name, how in conditions["slow"].items()}
    return Topology(**topology), Conditions(cuts, slow, frozenset(conditions["off"]))


def _guest(written: Mapping[str, str]) -> Host:
    return Host(written["name"], Role(written["role"]), written["site"], IPv4Address(written["address"]))
