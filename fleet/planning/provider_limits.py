"""What planners must know of a provider beside what it says of single machines: how long its machines take,
and whether they are bought in markets. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from fleet.planning.call_budget import TOPOLOGY_CALL_EVERY_S
from fleet.planning.machines import POOLED


@dataclass(frozen=True, slots=True)
class ProviderLimits:
    """`launch_grace_s`: how long after a launch "gone" may mean that the provider does not list the machine yet.
    `join_timeout_s`: from its launch until its agent must have joined; GPUStack gives a worker 150 s. `boot_s`: how
    long that usually takes. `places_s`: how long its cloud takes to say where 100 machines are in its network; 0: they
    say so themselves, or nobody does. `has_markets`: they are bought in one of several."""

    launch_grace_s: float = 10.0
    join_timeout_s: float = 120.0
    boot_s: float = 30.0
    places_s: float = 0.0
    has_markets: bool = False


LIMITS: Mapping[str, ProviderLimits] = {
    # A machine is not in every list at once, and one with many accelerators takes 15 minutes to boot.
    "aws": ProviderLimits(
        launch_grace_s=300.0, join_timeout_s=1200.0, boot_s=600.0, places_s=TOPOLOGY_CALL_EVERY_S, has_markets=True
    ),
    "local": ProviderLimits(),
    POOLED: ProviderLimits(),
}
"""By name, as regions name their provider. Here and not at the classes, because who reads the fleet for a plan must not
import what calls a cloud."""


def provider_limits(provider: str) -> ProviderLimits:
    """Of a provider that is gone from the registry, the usual ones: its regions' nodes are judged all the same."""
    return LIMITS.get(provider, ProviderLimits())
