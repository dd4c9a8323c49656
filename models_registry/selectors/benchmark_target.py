"""What a benchmark measures, and where its requests go. Only the fleet and traffic know; traffic registers both.

The registry lies below them and imports nothing of theirs."""

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from models_registry.planning.point_figures import Machines
from models_registry.planning.varied_columns import Cells


@dataclass(frozen=True, slots=True)
class BenchmarkTarget:
    """The cells of a deployment in a region. `cells` are their names with their generations: while they stay, the same
    is measured. `fingerprint` is that of their machines and engine. `in_flight`: requests that they have now. `split`:
    how many of them have which role (`1p+3d`); empty: all are mixed."""

    deployment: str
    region: str
    version_id: int
    instance_type: str
    fingerprint: str
    cells: tuple[str, ...]
    machines: Machines
    in_flight: int
    regions: tuple[str, ...] = ()
    """In which the deployment should have cells."""
    split: str = ""
    stated: Cells | None = None
    """Cells that a person stated for it there, as its API takes them; None: something else decides how many, or which
    roles they have."""


@dataclass(frozen=True, slots=True)
class Entrance:
    """Where requests for a deployment go in. `server_name`: whose certificate must be shown there."""

    host: str
    port: int
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None
    server_name: str | None = None


class ServingState(StrEnum):
    """Whether a deployment serves a version: it does, it is on its way, or it could not."""

    SERVES = "serves"
    MOVING = "moving"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Serving:
    """`reason`: what it does meanwhile, or why it could not."""

    state: ServingState
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ServeRequest:
    """Let a deployment serve a version (`model@version`). A rollout to it that failed after `since` is the answer.
    `cells`: with so many cells of each role; None: with those that it has."""

    deployment: str
    region: str
    version: str
    actor: str
    since: datetime
    now: datetime
    cells: Cells | None = None


class NoTarget(Exception):
    """Nothing there can be measured; the text says why, and what would help."""


Describe = Callable[[str, str], BenchmarkTarget]
"""Of a deployment and a region ("": its only one); raises `NoTarget`."""
Enter = Callable[[str, str], Entrance]
Serve = Callable[[ServeRequest], Serving]


@dataclass
class _Registered:
    describe: Describe | None = None
    enter: Enter | None = None
    serve: Serve | None = None


_traffic = _Registered()


def register_benchmark_targets(*, describe: Describe, enter: Enter, serve: Serve) -> None:
    """Called once, when traffic's app is ready."""
    _traffic.describe, _traffic.enter, _traffic.serve = describe, enter, serve


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


def benchmark_serve(request: ServeRequest) -> Serving:
    """Have a deployment serve a version: begins what is needed, and is asked again until it has come to an end.

    Raises:
        LookupError: traffic has not registered.
    """
    if _traffic.serve is None:
        raise LookupError("traffic has not registered how a deployment serves a version")
    return _traffic.serve(request)
