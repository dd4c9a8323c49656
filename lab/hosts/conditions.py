"""What is wrong with the laboratory's network just now: cuts, slow hosts, hosts without power. Pure: what each router
must drop, what it must hand to the relay, and how long the relay keeps a packet."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from lab.hosts.topology import CONTROL_SITE, CORE, EVERYTHING, OUTSIDE, Host, NoLaboratory, Role, Topology

LONGEST_DELAY_S = 60.0
Pair = tuple[IPv4Network, IPv4Network]
"""Packets from the first to the second."""


class Lost(StrEnum):
    """The direction in which packets of a cut-off host are lost."""

    BOTH = "both"
    SENT = "sent"
    RECEIVED = "received"


@dataclass(frozen=True, slots=True)
class Cut:
    """`name` is cut off from `other`, or from all. With `SENT` it still hears and is not heard."""

    name: str
    other: str | None = None
    lost: Lost = Lost.BOTH

    def __str__(self) -> str:
        what = {Lost.BOTH: "", Lost.SENT: ", hears but is not heard", Lost.RECEIVED: ", is heard but hears nothing"}
        return f"cut off from {self.other or 'all'}{what[self.lost]}"


@dataclass(frozen=True, slots=True)
class Slowness:
    """Of each packet, on its way in and on its way out: seconds later, and the share of them that is lost."""

    delay_s: float = 0.0
    loss: float = 0.0

    def __str__(self) -> str:
        return f"{self.delay_s * 1000:g} ms later each way, {self.loss:.3g} lost"


@dataclass(frozen=True, slots=True)
class Conditions:
    """All of it. `slow`: by host or region, whose counts for what leaves or enters it. `off`: hosts without power."""

    cuts: tuple[Cut, ...] = ()
    slow: Mapping[str, Slowness] = field(default_factory=dict)
    off: frozenset[str] = frozenset()

    def with_cut(self, cut: Cut) -> "Conditions":
        return self if cut in self.cuts else replace(self, cuts=(*self.cuts, cut))

    def with_slow(self, name: str, slowness: Slowness) -> "Conditions":
        if not 0 <= slowness.delay_s <= LONGEST_DELAY_S:
            raise NoLaboratory(f"A delay of {slowness.delay_s:g} s: give 0 to {LONGEST_DELAY_S:g} s.")
        if not 0 <= slowness.loss < 1:
            raise NoLaboratory(f"A loss of {slowness.loss:.0%}: give 0 % to below 100 %; a cut loses all.")
        return replace(self, slow={**self.slow, name: slowness})

    def healed(self, name: str | None) -> "Conditions":
        if name is None:
            return Conditions(off=self.off)
        slow = {each: how for each, how in self.slow.items() if each != name}
        return replace(self, cuts=tuple(cut for cut in self.cuts if cut.name != name), slow=slow)

    def with_power(self, name: str, *, on: bool) -> "Conditions":
        return replace(self, off=self.off - {name} if on else self.off | {name})

    def without(self, name: str) -> "Conditions":
        """Removes the conditions of a host, because a new host may get its address."""
        cuts = tuple(cut for cut in self.cuts if name not in {cut.name, cut.other})
        slow = {each: how for each, how in self.slow.items() if each != name}
        return Conditions(cuts, slow, self.off - {name})

    def of(self, name: str) -> list[str]:
        slow = [f"slow: {self.slow[name]}"] if name in self.slow else []
        return [*(str(cut) for cut in self.cuts if cut.name == name), *slow]


def dropped(topology: Topology, conditions: Conditions) -> frozenset[Pair]:
    """Rules of every router that drop packets silently. A host without power receives nothing, and its last packets
    must not reveal that it went down."""
    pairs: set[Pair] = set()
    cuts = (*conditions.cuts, *(Cut(name) for name in conditions.off))
    for cut in cuts:
        own = topology.network_of(cut.name)
        for other in _networks_beyond(topology, cut):
            pairs |= {(own, other)} if cut.lost is not Lost.RECEIVED else set()
            pairs |= {(other, own)} if cut.lost is not Lost.SENT else set()
    return frozenset(pairs)


def _networks_beyond(topology: Topology, cut: Cut) -> list[IPv4Network]:
    """The other side. A site that is cut off from all others still works internally."""
    if cut.other:
        return [topology.network_of(cut.other)]
    if cut.name in topology.hosts:
        return [EVERYTHING]
    return [network for site, network in topology.networks.items() if site != cut.name]


def relayed(topology: Topology, conditions: Conditions) -> dict[str, frozenset[Pair]]:
    """Router -> what it hands to the relay. A packet between two sites is handed over between them alone, one within a
    region by the region's router: no packet twice."""
    sites = topology.networks
    core: set[Pair] = {(sites[one], sites[two]) for (one, two), delay_s in topology.distances().items() if delay_s}
    regions: dict[str, set[Pair]] = {region: set() for region in topology.regions}
    for name in conditions.slow:
        own = topology.network_of(name)
        core |= {(own, sites[site]) for site in sites} | {(sites[site], own) for site in sites}
        host = topology.hosts.get(name)
        if host and host.site in regions:
            here = sites[host.site]
            core -= {(own, here), (here, own)}
            regions[host.site] |= {(own, here), (here, own)}
        elif not host:
            core -= {(own, own)}
    return {CORE: frozenset(core), **{region: frozenset(pairs) for region, pairs in regions.items()}}


@dataclass(frozen=True)
class Paths:
    topology: Topology
    conditions: Conditions

    def between(self, source: IPv4Address, destination: IPv4Address) -> Slowness:
        start, end = self._site(source), self._site(destination)
        passed = [self._host(source), self._host(destination)]
        if start != end:
            passed += [start, end]
        slow = [self.conditions.slow[name] for name in passed if name in self.conditions.slow]
        distance_s = self.topology.distances().get((start, end), 0.0)
        arrives = 1.0
        for each in slow:
            arrives *= 1 - each.loss
        return Slowness(distance_s + sum(each.delay_s for each in slow), 1 - arrives)

    def _site(self, address: IPv4Address) -> str:
        return next((site for site, network in self.topology.networks.items() if address in network), OUTSIDE)

    def _host(self, address: IPv4Address) -> str:
        return next((name for name, host in self.topology.hosts.items() if host.address == address), OUTSIDE)


RELAY, RELAY_FAR_END = "relay0", "relay1"
UPLINK, CABLE = "uplink", "eth0"
RELAY_TABLE = 77
DROP_RULE, RETURN_RULE, RELAY_RULE = 100, 200, 300
"""In the order of the kernel. A dropped packet is also dropped on its way back from the relay."""
SYSCTLS = {"ip_forward": "1", "conf/all/rp_filter": "0", "conf/default/rp_filter": "0"}
"""Of each router, under /proc/sys/net/ipv4."""

Steps = list[tuple[str, list[str]]]
"""Network namespace -> lines for `ip -batch -` in it, one after the other."""


def router_steps(topology: Topology) -> Steps:
    steps: Steps = [(router, list(_RELAY_CABLE)) for router in topology.routers]
    uplinks = [(region, f"10.254.{number}.0", f"10.254.{number}.1") for number, region in enumerate(topology.regions)]
    for region, near, far in uplinks:
        steps += [
            (
                CORE,
                [
                    f"link add {region} type veth peer name {UPLINK} netns {region}",
                    f"addr add {near}/31 dev {region}",
                    f"link set {region} up",
                ],
            ),
            (
                region,
                [f"addr add {far}/31 dev {UPLINK}", f"link set {UPLINK} up", f"route add default via {near}"],
            ),
            (CORE, [f"route add {topology.networks[region]} via {far}"]),
        ]
    # An unused address is silent, as that of a host without power is.
    nobody = [(CORE, CONTROL_SITE), *((region, region) for region in topology.regions)]
    return [*steps, *((router, [f"route add blackhole {topology.networks[site]}"]) for router, site in nobody)]


_RELAY_CABLE = (
    "link set lo up",
    f"link add {RELAY} type veth peer name {RELAY_FAR_END}",
    # Without ARP the kernel addresses each frame to this end itself: the relay sends it back as it is.
    f"link set {RELAY} arp off",
    f"link set {RELAY_FAR_END} arp off",
    f"link set {RELAY} up",
    f"link set {RELAY_FAR_END} up",
    f"route add default dev {RELAY} table {RELAY_TABLE}",
    f"rule add pref {RETURN_RULE} iif {RELAY} lookup main",
)


def host_cable(topology: Topology, host: Host, link_local: Iterable[IPv4Address] = ()) -> Steps:
    """The cable of a host to its router, both ends; the host's namespace has its name. `link_local`: addresses that it
    alone reaches."""
    cable = _cable(topology.router_of(host), host.name, str(topology.gateway(host.site)), str(host.address))
    return [*cable, (host.name, [f"addr add {address}/32 dev lo" for address in link_local])]


def outside_cable(topology: Topology) -> Steps:
    return _cable(CORE, OUTSIDE, str(topology.gateway(OUTSIDE)), str(topology.networks[OUTSIDE][1]))


def _cable(router: str, name: str, gateway: str, address: str) -> Steps:
    return [
        (
            router,
            [
                f"link add {name} type veth peer name {CABLE} netns {name}",
                f"addr add {gateway}/32 dev {name}",
                f"link set {name} up",
                f"route add {address}/32 dev {name} src {gateway}",
            ],
        ),
        (
            name,
            [
                "link set lo up",
                f"addr add {address}/32 dev {CABLE}",
                f"link set {CABLE} up",
                f"route add {gateway}/32 dev {CABLE} scope link",
                f"route add default via {gateway} dev {CABLE} src {address}",
            ],
        ),
    ]


def rules(drops: Iterable[Pair], relays: Iterable[Pair]) -> frozenset[str]:
    return frozenset(
        [f"pref {DROP_RULE} {_selector(pair)} blackhole" for pair in drops]
        + [f"pref {RELAY_RULE} {_selector(pair)} lookup {RELAY_TABLE}" for pair in relays]
    )


def rules_to_change(before: frozenset[str], after: frozenset[str]) -> list[str]:
    """From the one to the other: new ones first, so that nothing is healed on the way that stays cut."""
    return [*(f"rule add {rule}" for rule in sorted(after - before)),
            *(f"rule del {rule}" for rule in sorted(before - after))]  # fmt: skip


def _selector(pair: Pair) -> str:
    source, destination = pair
    return f"from {_prefix(source)} to {_prefix(destination)}"


def _prefix(network: IPv4Network) -> str:
    return "all" if network == EVERYTHING else str(network)


def write_state(topology: Topology, conditions: Conditions) -> dict[str, Any]:
    temporary_hosts = [{**asdict(added), "address": str(added.address)} for added in topology.temporary_hosts]
    return {
        "topology": {**asdict(topology), "temporary_hosts": temporary_hosts},
        "conditions": {**asdict(conditions), "off": sorted(conditions.off)},
    }


def read_state(state: Mapping[str, Any]) -> tuple[Topology, Conditions]:
    topology, conditions = dict(state["topology"]), state["conditions"]
    topology["regions"] = tuple(topology["regions"])
    topology["temporary_hosts"] = tuple(_temporary_host(each) for each in topology["temporary_hosts"])
    cuts = tuple(Cut(each["name"], each["other"], Lost(each["lost"])) for each in conditions["cuts"])
    slow = {name: Slowness(**how) for name, how in conditions["slow"].items()}
    return Topology(**topology), Conditions(cuts, slow, frozenset(conditions["off"]))


def _temporary_host(written: Mapping[str, str]) -> Host:
    return Host(written["name"], Role(written["role"]), written["site"], IPv4Address(written["address"]))
