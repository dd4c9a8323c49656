"""What the processes of this host counted, as Prometheus's registries and text. It knows nothing of the fleet, so that
workers can tell it too."""

from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from kernel.metrics import FOLDER, OURS


def counted() -> CollectorRegistry:
    """What was counted here, over all processes that share the folder."""
    if FOLDER is None:
        return OURS
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(FOLDER))  # type: ignore[no-untyped-call]
    return registry
