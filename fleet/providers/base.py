"""What a provider of machines must be able to do. The fleet knows machines only through this."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from engine_agent.protocol.states import AgentKind
from fleet.planning.snapshot import ProviderStatus


class ProviderError(Exception):
    """A provider refused a call or did not respond; the text says which call and why."""


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """One machine to boot. `join_token` lets its agent enrol, once; `bundle` are the authorities (PEM) by which it
    knows the control plane, which it must find in `tls/ca.pem` of its home.

    `release`: of the agent, where the provider starts it from this computer; "" for the checkout's. `near`: the network
    nodes, widest first, below which it should stand if there is room. `address` and `port` are set where they are fixed
    beforehand, as an ingress's are; None: the provider or the machine itself decides.
    """

    id: str
    kind: AgentKind
    region: str
    join_token: str
    bundle: str = ""
    instance_type: str = ""
    near: tuple[str, ...] = ()
    address: str | None = None
    port: int | None = None
    release: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a provider knows of a machine. None: not known yet; the agent's hello states it.

    `port_base` is the first of the `PORTS_PER_NODE` ports of its node; `topology` lists the network nodes above it,
    widest first.
    """

    address: str | None = None
    port_base: int | None = None
    topology: tuple[str, ...] | None = None


class NodeProvider(Protocol):
    """Launches, describes and terminates machines. Calls may block; they are never made inside a transaction."""

    name: str

    @classmethod
    def from_settings(cls) -> "NodeProvider":
        """The provider as Django's settings configure it."""

    def launch(self, spec: LaunchSpec) -> Machine:
        """Order a machine and return at once, whether or not it has booted. Idempotent by `spec.id`: a second call for
        the same id launches no second machine, and returns what is known by then.

        Raises:
            ProviderError: it will not boot.
        """

    def restart_agent(self, node_id: str) -> None:
        """Start a machine's agent again, without touching its engine.

        Raises:
            ProviderError: it did not start.
        """

    def move_agents(self, releases: Mapping[str, str]) -> dict[str, str]:
        """Have each of these agents run a release, whatever runs beside it untouched. Returns whose provider cannot do
        so, and why. Said again for as long as an agent runs another one.

        Raises:
            ProviderError: none can be moved.
        """

    def describe(self, node_ids: Sequence[str]) -> dict[str, ProviderStatus]:
        """The status of each of these machines. One that is booting is `running`, one that is unknown `gone`.

        Raises:
            ProviderError: no statement can be made of any of them.
        """

    def terminate(self, node_id: str) -> None:
        """End a machine with everything that runs on it. Ending one that is gone is no error.

        Raises:
            ProviderError: it may still run.
        """

    def describe_all(self) -> dict[str, ProviderStatus]:
        """The status of every machine that it runs for nodes of this fleet, by the node's id: orphans are found by it.

        Raises:
            ProviderError: it cannot say.
        """


@runtime_checkable
class EmbeddedProvider(NodeProvider, Protocol):
    """A provider whose machines are processes of this computer."""

    def terminate_all(self) -> int:
        """End every machine. Returns how many processes that were."""
