"""What a provider of machines must be able to do. The fleet knows machines only through this.

Providers of machines, by the name that regions use. `README.md` says what one promises and how to add one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, cast

from django.utils.module_loading import import_string

from engine_agent.protocol.states import AgentKind
from fleet.reconcile.planning.snapshot import ProviderStatus

QUOTA_RETRY_S = 600.0
"""A person must ask for more first."""


class ProviderError(Exception):
    """A provider refused a call or did not respond; the text says which call and why, so that an operator can act.

    Raised as it is, it is a refusal: the same call would be refused again. `may_repeat`: the order stays, and is tried
    again. `retry_after_s`: not before that; None: the provider does not say.
    """

    may_repeat: ClassVar[bool] = False
    retry_after_s: float | None = None


class Unknown(ProviderError):
    """Whether it was done is not known: the answer was lost, or makes no sense. Repeated until it is."""

    may_repeat = True


class Later(ProviderError):
    """Not done for now, and nothing is wrong: there were too many calls, or something is being changed."""

    may_repeat = True

    def __init__(self, text: str, retry_after_s: float | None = None) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class NoCapacity(Later):
    """There is no such machine to be had at the moment."""


class NoQuota(Later):
    """The account has as many machines as it may; `quota` names what must be raised."""

    def __init__(self, text: str, quota: str) -> None:
        super().__init__(f"{text}; its quota is {quota}", QUOTA_RETRY_S)


class AttemptEnded(ProviderError):
    """The machine of this launch had been there and has ended: this id gets no other one."""


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """One machine to boot. `join_token` lets its agent enrol, once; `bundle` are the authorities (PEM) by which it
    knows the control plane, which it must find in `tls/ca.pem` of its home. `unit`: those that are launched by one call
    have the same; "": it is launched alone.

    `release`: of the agent, where the provider starts it from this computer; "" for the checkout's. `near`: the network
    nodes, widest first, below which it should stand if there is room; `markets`: in which it may be bought, empty: any.
    `address` and `port` are set where they are fixed
    beforehand, as an ingress's are; None: the provider or the machine itself decides.
    """

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
    """What a provider knows of a machine. None: not known yet; the agent's hello states it.

    `port_base` is the first of the `PORTS_PER_NODE` ports of its node; `topology` lists the network nodes above it,
    widest first. `market`: in which it was bought; "": in none.
    """

    address: str | None = None
    port_base: int | None = None
    topology: tuple[str, ...] | None = None
    market: str = ""


class NodeProvider(Protocol):
    """Launches, describes and terminates machines. Calls may block; they are never made inside a transaction. Beside
    what each raises, any may raise `Later` or `Unknown`.
    """

    name: str

    @classmethod
    def from_settings(cls) -> "NodeProvider":
        """The provider as Django's settings configure it."""

    def launch(self, specs: Sequence[LaunchSpec]) -> tuple[Machine, ...]:
        """Order machines that shall stand together, as those of one cell, and return at once, whether or not they have
        booted: what is known of each, in this order. They are of one region and alike; all or none if it can.
        Idempotent by `LaunchSpec.id`: a second call for the same ids launches no second machine for any of them, and
        returns what is known by then. One that was given back meanwhile is missing in it.

        Raises:
            NoCapacity, NoQuota: not now; it is asked again.
            AttemptEnded: it was launched, and has ended since.
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
        """The status of each of these machines. One that is booting is `running`; `gone` is one of which it is proven,
        and `unknown` one of which nothing can be said: that it is not found proves nothing where lists lag.

        Raises:
            ProviderError: no statement can be made of any of them.
        """

    def terminate(self, node_id: str) -> None:
        """End a machine with everything that runs on it. Ending one that is gone is no error.

        Raises:
            ProviderError: it may still run.
        """

    def describe_all(self) -> dict[str, ProviderStatus]:
        """The status of every machine that it runs for nodes of this fleet, by the node's id, for garbage collection.

        Raises:
            ProviderError: it cannot say.
        """


class EmbeddedProvider(NodeProvider, Protocol):
    """A provider whose machines are processes of this computer."""

    def terminate_all(self) -> int:
        """End every machine. Returns how many processes that were."""


PROVIDERS: Mapping[str, str] = {
    "aws": "fleet.clouds.aws.provider.AwsProvider",
    "local": "fleet.clouds.local.LocalProvider",
    "machines": "fleet.clouds.machines.MachinesProvider",
}
"""Name -> class. A class is imported when it is first used, so that an unused one needs none of its libraries."""
EMBEDDED = ("local",)
"""Of these, the ones whose machines are processes of this computer."""


def provider_named(name: str) -> NodeProvider:
    """The provider of a region.

    Raises:
        ProviderError: there is no such provider.
    """
    if name not in PROVIDERS:
        raise ProviderError(f"unknown provider {name!r}; there is: {', '.join(sorted(PROVIDERS))}")
    return cast(NodeProvider, import_string(PROVIDERS[name]).from_settings())


def embedded_providers() -> list[EmbeddedProvider]:
    """The providers whose machines are processes of this computer: `make down` stops them, `make up` boots them. No
    other one is imported for that."""
    return [cast(EmbeddedProvider, provider_named(name)) for name in EMBEDDED]
