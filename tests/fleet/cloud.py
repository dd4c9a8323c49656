"""A provider that boots nothing, records its calls, and reports the statuses that it is given."""

from collections.abc import Mapping, Sequence

from fleet.clouds.base import LaunchSpec, Machine, ProviderError
from fleet.reconcile.planning.snapshot import ProviderStatus

FIRST_PORT = 60_000


class Cloud:
    """`status` is that of every machine, `statuses` that of single ones. While `broken` it refuses every change, while
    `silent` it does not even describe machines. `answer`: what it says to every change instead of making it.
    `together`: how many machines each launch was of.
    """

    name = "cloud"

    def __init__(self) -> None:
        self.status = ProviderStatus.GONE
        self.statuses: dict[str, ProviderStatus] = {}
        self.broken = False
        self.answer: ProviderError | None = None
        self.silent = False
        self.launched: list[LaunchSpec] = []
        self.together: list[int] = []
        self.restarted: list[str] = []
        self.rebooted: list[str] = []
        self.terminated: list[str] = []
        self.moved: list[dict[str, str]] = []

    @classmethod
    def from_settings(cls) -> "Cloud":
        return cls()

    def launch(self, specs: Sequence[LaunchSpec]) -> tuple[Machine, ...]:
        self._refuse_if_broken()
        self.together.append(len(specs))
        return tuple(self._boot(spec) for spec in specs)

    def _boot(self, spec: LaunchSpec) -> Machine:
        number = len(self.launched)
        self.launched.append(spec)
        return Machine("127.0.0.1", FIRST_PORT + 20 * number, spec.near or (spec.region, f"rack-{number // 4}"))

    def restart_agent(self, node_id: str) -> None:
        self._refuse_if_broken()
        self.restarted.append(node_id)

    def reboot(self, node_id: str) -> None:
        self._refuse_if_broken()
        self.rebooted.append(node_id)

    def move_agents(self, releases: Mapping[str, str]) -> dict[str, str]:
        self._refuse_if_broken()
        self.moved.append(dict(releases))
        return {}

    def describe(self, node_ids: Sequence[str]) -> dict[str, ProviderStatus]:
        if self.silent:
            raise ProviderError("no answer")
        return {node: self.statuses.get(node, self.status) for node in node_ids}

    def describe_all(self) -> dict[str, ProviderStatus]:
        if self.silent:
            raise ProviderError("no answer")
        return dict(self.statuses)

    def terminate(self, node_id: str) -> None:
        self._refuse_if_broken()
        self.terminated.append(node_id)

    def terminate_all(self) -> int:
        return 0

    def _refuse_if_broken(self) -> None:
        if self.answer is not None:
            raise self.answer
        if self.broken:
            raise ProviderError("no capacity")
