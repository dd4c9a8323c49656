"""What a provider of machines must be able to do. The fleet knows machines only through this."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine_agent.protocol.states import AgentKind
from fleet.planning.snapshot import ProviderStatus


class ProviderError(Exception):
    """A provider refused or did not answer; the text says which call and why."""


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """One machine to boot. `join_token` lets its agent enrol, once."""

    id: str
    kind: AgentKind
    region: str
    address: str
    port: int
    join_token: str
    instance_type: str = ""
    topology: tuple[str, ...] = ()


class NodeProvider(Protocol):
    """Launches, describes and terminates machines. Calls may block; never made inside a transaction."""

    name: str

    def free_ports(self, taken: Sequence[int]) -> int:
        """First port of a block that no node owns and nothing listens in.

        Raises:
            ProviderError: no block is free.
        """

    def topology(self, region: str, position: int) -> tuple[str, ...]:
        """Network nodes above the place with this number in a region, widest first; places are filled from 0. Empty
        where the provider alone decides: agents then say where they are."""

    def launch(self, spec: LaunchSpec) -> None:
        """Boot a machine.

        Raises:
            ProviderError: it did not start.
        """

    def restart_agent(self, node_id: str) -> None:
        """Start a machine's agent again, without touching its engine.

        Raises:
            ProviderError: it did not start.
        """

    def describe(self, node_ids: Sequence[str]) -> dict[str, ProviderStatus]:
        """What is known of these machines; ones that are unknown are `gone`."""

    def terminate(self, node_id: str) -> None:
        """End a machine with everything that runs on it. Ending one that is gone is no error."""
