"""The interface of machine providers, and the providers by the names that regions use. Other packages reach machines
only through it. `README.md` says what a provider promises and how to add one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, cast

from django.utils.module_loading import import_string

from engine_agent.protocol.states import AgentKind
from fleet.reconcile.planning.snapshot import ProviderStatus

QUOTA_RETRY_S = 600.0
"""An operator must first request more."""


class ProviderError(Exception):
    """A provider refused a call or did not respond; the text names the call and the reason for an operator.

    Raised itself, it is a refusal that a repeated call would get again. `may_repeat`: the order stays and is retried,
    not before `retry_after_s`; None: the provider states no time."""

    may_repeat: ClassVar[bool] = False
    retry_after_s: float | None = None


class Unknown(ProviderError):
    """The outcome is not known: the answer was lost or unreadable. Repeated until it is."""

    may_repeat = True


class Later(ProviderError):
    """Not done yet, without a fault: too many calls, or another change is in progress."""

    may_repeat = True

    def __init__(self, text: str, retry_after_s: float | None = None) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class NoCapacity(Later):
    """The provider has no such machine now."""


class NoQuota(Later):
    """The account's limit is reached; `quota` names the quota to raise."""

    def __init__(self, text: str, quota: str) -> None:
        super().__init__(f"{text}; its quota is {quota}", QUOTA_RETRY_S)


class AttemptEnded(ProviderError):
    """The machine of this launch existed and has ended: this ID gets no other one."""


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """One machine to boot. `join_token` lets its agent enrol once. `bundle`: PEM of the authorities of the control
    plane, written to `tls/ca.pem` of its home. `unit`: specs of one launch call have the same; "": launched alone.

    `release`: of the agent, if the provider starts it on this computer; "": the checkout. `near`: network nodes, widest
    first, to place it under if there is room. `markets`: allowed ways to buy it; empty: any. `address` and `port` are
    set if fixed in advance, as for ingresses; None: chosen by the provider or the machine."""

    id: str
    kind: AgentKind
    region: str
    join_token: str
    bundle: str = ""
    instance_type: str = ""
    near: tuple[str, ...] = ()
    markets: tuple[str, ...] = ()
    address: str | None = None
    port: int | None = None
    release: str = ""
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts about a machine. Facts that are None are not known yet; the agent's hello states them.

    `port_base`: first of the `PORTS_PER_NODE` ports of its node. `topology`: network nodes above it, widest first.
    `market`: how it was bought, or ""."""

    address: str | None = None
    port_base: int | None = None
    topology: tuple[str, ...] | None = None
    market: str = ""


class NodeProvider(Protocol):
    """Launches, describes and terminates machines. Calls may block and are never made inside a transaction. Any of them
    may also raise `Later` or `Unknown`."""

    name: str

    @classmethod
    def from_settings(cls) -> "NodeProvider":
        """Returns the provider as configured by Django's settings."""

    def launch(self, specs: Sequence[LaunchSpec]) -> tuple[Machine, ...]:
        """Orders machines that belong together, such as those of one cell: alike, in one region, all or none if
        possible. Returns immediately with the known facts of each, in order, booted or not. Idempotent by
        `LaunchSpec.id`: a second call launches no second machine and returns the facts known by then, without machines
        that were given back. Raises NoCapacity or NoQuota if it is not now; the call is repeated. Raises AttemptEnded
        if it was launched and has ended. Raises ProviderError if it will not boot."""

    def restart_agent(self, node_id: str) -> None:
        """Restarts a machine's agent without touching its engine. Raises ProviderError if it did not start."""

    def reboot(self, node_id: str) -> None:
        """Reboots a machine, and returns without waiting for it. Its agent starts with it. Raises ProviderError if the
        provider has no power control or refuses."""

    def move_agents(self, releases: Mapping[str, str]) -> dict[str, str]:
        """Moves each of these agents to a release without touching other processes. Returns the agents whose provider
        cannot do so, with the reason. Repeated while an agent runs another release. Raises ProviderError if none can be
        moved."""

    def describe(self, node_ids: Sequence[str]) -> dict[str, ProviderStatus]:
        """Returns the status of each machine. A booting one is `running`. `gone` needs proof: a machine that lists do
        not show is `unknown` if lists may lag. Raises ProviderError if the provider cannot describe any of them."""

    def terminate(self, node_id: str) -> None:
        """Terminates a machine with everything that runs on it. A machine that is already gone is not an error. Raises
        ProviderError if it may still run."""

    def describe_all(self) -> dict[str, ProviderStatus]:
        """Returns the status of every machine that it runs for this fleet, by node ID, for garbage collection. Raises
        ProviderError if the list failed."""


class EmbeddedProvider(NodeProvider, Protocol):
    """A provider whose machines are processes on this computer."""

    def terminate_all(self) -> int:
        """Terminates every machine. Returns the number of processes."""


PROVIDERS: Mapping[str, str] = {
    "aws": "fleet.clouds.aws.provider.AwsProvider",
    "ecs": "fleet.clouds.ecs.provider.EcsProvider",
    "local": "fleet.clouds.local.LocalProvider",
    "machines": "fleet.clouds.machines.MachinesProvider",
}
"""Name to class. Imported on first use, so that unused providers need no libraries."""
EMBEDDED = ("local",)
"""Providers whose machines are processes on this computer."""


def provider_named(name: str) -> NodeProvider:
    """Returns a region's provider. Raises ProviderError if there is no such provider."""
    if name not in PROVIDERS:
        raise ProviderError(f"unknown provider {name!r}; there is: {', '.join(sorted(PROVIDERS))}")
    return cast(NodeProvider, import_string(PROVIDERS[name]).from_settings())


def embedded_providers() -> list[EmbeddedProvider]:
    """Returns the embedded providers: `make down` stops their machines, `make up` boots them. Imports no other
    provider."""
    return [cast(EmbeddedProvider, provider_named(name)) for name in EMBEDDED]
