"""The simulated provider: it boots and ends machines, says which run, and starts dead agents again."""

from typing import Protocol

from fleet.planning.snapshot import ProviderStatus


class Provider(Protocol):
    """What the store's effects outside of a transaction need."""

    def launch(self, node: str, region: str, topology: tuple[str, ...]) -> None: ...

    def terminate(self, node: str) -> None:
        """End a machine; nothing if there is none."""

    def restart_agent(self, node: str) -> None:
        """Start the agent of a running machine."""

    def topology(self, region: str, near: tuple[str, ...]) -> tuple[str, ...]:
        """The network nodes of the machine that is launched next, below `near` if there is place."""

    def describe(self, node: str) -> ProviderStatus: ...


class NoProvider:
    """Says nothing and does nothing: for stores without a world under them."""

    def launch(self, node: str, region: str, topology: tuple[str, ...]) -> None:
        pass

    def terminate(self, node: str) -> None:
        pass

    def restart_agent(self, node: str) -> None:
        pass

    def topology(self, region: str, near: tuple[str, ...]) -> tuple[str, ...]:
        return near or (region,)

    def describe(self, node: str) -> ProviderStatus:
        return ProviderStatus.UNKNOWN
