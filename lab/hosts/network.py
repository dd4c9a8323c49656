"""The laboratory's network as commands of `ip`, in the order in which they are to be run. Pure.

Every host hangs on its router by a cable of its own (a veth pair), with routes and no bridge, so that a router sees
each packet and can drop it without telling anybody. Beside its cables a router has one to itself, `relay0`: what is
routed there arrives at `relay1`, where the relay reads whole frames, and what the relay sends comes back by `relay0`.
"""

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network

from lab.hosts.conditions import Pair
from lab.hosts.topology import CONTROL_SITE, CORE, EVERYTHING, OUTSIDE, Host, Topology

RELAY, RELAY_FAR_END = "relay0", "relay1"
UPLINK, CABLE = "uplink", "eth0"
RELAY_TABLE = 77
DROP_RULE, RETURN_RULE, RELAY_RULE = 100, 200, 300
"""In the order in which the kernel asks them: dropped is dropped on the way back from the relay, too."""
SYSCTLS = {"ip_forward": "1", "conf/all/rp_filter": "0", "conf/default/rp_filter": "0"}
"""Of each router, under /proc/sys/net/ipv4."""

Steps = list[tuple[str, list[str]]]
"""Network namespace -> lines for `ip -batch -` in it, one after the other."""


def router_steps(topology: Topology) -> Steps:
    """The routers and what lies between them; their namespaces are there already."""
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
    # An address that nobody has is silent, as one of a host without power.
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
    """The same of where clients come in."""
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
    """The rules of a router beside those that it always has, each as `ip rule add` takes it."""
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
