"""What a benchmark measures, and where its requests go. Only the fleet and traffic know; traffic registers both.

The registry lies below them and imports nothing of theirs."""

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from models_registry.planning.point_figures import Machines


@dataclass(frozen=True, slots=True)
class BenchmarkTarget:
    """The cells of a deployment in a region. `cells` are their names with their generations: while they stay, the same
    is measured. `fingerprint` is that of their machines and engine. `in_flight`: requests that they have now."""

    deployment: str
    region: str
    version_id: int
    instance_type: str
    fingerprint: str
    cells: tuple[str, ...]
    machines: Machines
    in_flight: int


@dataclass(frozen=True, slots=True)
class Entrance:
    """Where requests for a deployment go in. `server_name`: whose certificate must be shown there."""

    host: str
    port: int
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None
    server_name: str | None = None


class NoTarget(Exception):
    """Nothing there can be measured; the text says why, and what would help."""


Describe = Callable[[str, str], BenchmarkTarget]
"""Of a deployment and a region ("": its only one); raises `NoTarget`."""
Enter = Callable[[str, str], Entrance]


@dataclass
class _Registered:
    describe: Describe | None = None
    enter: Enter | None = None


_traffic = _Registered()


def register_benchmark_targets(*, describe: Describe, enter: Enter) -> None:
    """Called once, when traffic's app is ready."""
    _traffic.describe, _traffic.enter = describe, enter


def benchmark_target(deployment: str, region: str) -> BenchmarkTarget:
    """What serves a deployment in a region.

    Raises:
        NoTarget: nothing that can be measured.
        LookupError: traffic has not registered.
    """
    if _traffic.describe is None:
        raise LookupError("traffic has not registered what benchmarks measure")
    return _traffic.describe(deployment, region)


def benchmark_entrance(deployment: str, region: str) -> Entrance:
    """Where its requests go in.

    Raises:
        NoTarget: nowhere.
        LookupError: traffic has not registered.
    """
    if _traffic.enter is None:
        raise LookupError("traffic has not registered where benchmarks enter")
    return _traffic.enter(deployment, region)
