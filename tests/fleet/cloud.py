"""A provider that boots nothing, notes what it is asked, and says what it is told to."""

from collections.abc import Sequence

from fleet.planning.snapshot import ProviderStatus
from fleet.providers.base import LaunchSpec, ProviderError


class Cloud:
    """`status` is what it says of every machine, or of one by `says`; while `broken` it refuses
    what would change something, while `silent` it does not even say how machines are."""

    name = "cloud"

    def __init__(self) -> None:
        self.status = ProviderStatus.GONE
        self.says: dict[str, ProviderStatus] = {}
        self.broken = False
        self.silent = False
        self.launched: list[LaunchSpec] = []
        self.restarted: list[str] = []
        self.terminated: list[str] = []

    def free_ports(self, taken: Sequence[int]) -> int:
        return max((*taken, 40000)) + 20

    def topology(self, region: str, position: int) -> tuple[str, ...]:
        return (region, f"rack-{position // 4}")

    def launch(self, spec: LaunchSpec) -> None:
        self._work()
        self.launched.append(spec)

    def restart_agent(self, node_id: str) -> None:
        self._work()
        self.restarted.append(node_id)

    def describe(self, node_ids: Sequence[str]) -> dict[str, ProviderStatus]:
        if self.silent:
            raise ProviderError("no answer")
        return {node: self.says.get(node, self.status) for node in node_ids}

    def terminate(self, node_id: str) -> None:
        self._work()
        self.terminated.append(node_id)

    def _work(self) -> None:
        if self.broken:
            raise ProviderError("no capacity")
