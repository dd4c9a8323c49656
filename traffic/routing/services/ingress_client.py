"""Sends requests to an ingress over HTTP/1.1, with limits on time and size, and returns the response whole or as a
stream. It connects to the hop port over TLS with the control plane's certificate and verifies the ingress's name.
Closing a stream cuts its connection, which stops the engine's work. It also describes and prepares the deployment that
a benchmark measures (registered with the model registry, a lower layer)."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
from django.conf import settings

from engine_agent.node.identity import Identity
from engine_agent.protocol.identity import IdentityKind, IdentityName
from engine_agent.protocol.ports import hop_port
from engine_agent.protocol.states import CellRole
from fleet.autoscaling.planning.policy import (
    CellPools,
    CellRange,
    InvalidScaling,
    cells_as_json,
    cells_to_text,
    parse_cells,
)
from fleet.autoscaling.planning.role_split import RoleSplit, counted
from fleet.cells.models import Cell, CellMember
from fleet.deployments.models import Deployment
from fleet.deployments.selectors import engine_on
from fleet.deployments.services.deployments import deployment_scale
from fleet.nodes.planner import stack_digest
from fleet.reconcile.planning.states import CellState, RolloutState
from fleet.rollouts.models import Rollout
from fleet.rollouts.selectors import ACTIVE
from fleet.rollouts.services import rollout_propose, rollout_start
from kernel.refusals import Conflict, InvalidInput
from models_registry.benchmarks.planning.configuration_search import Cells, cells_count, split_text
from models_registry.benchmarks.planning.measurements import Machines
from models_registry.benchmarks.selectors import (
    BenchmarkTarget,
    Entrance,
    NoTarget,
    ServeRequest,
    Serving,
    ServingState,
)
from traffic.async_requests.planner import AttemptResponse
from traffic.async_requests.selectors import ingress_addresses_by_region
from traffic.keys.planner import playground_key_text, sender_key_text
from traffic.keys.selectors import key_ring_version
from traffic.routing.planning.tables import IngressAddress
from traffic.routing.services.ingress_connections import (
    BrokenOff,
    NotConnected,
    Place,
    TooLong,
    WholeResponse,
    whole_response,
)

CONNECT_LIMIT_S = 3.0
ANSWER_ROOM_S = 2.0
"""A cell answers at the deadline of a request; the response needs time to arrive."""
T = TypeVar("T")
_NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For plain links. Loading the default certificate authorities would cost about 300 ms per client."""


class AcceptedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of an accepted request. `key` is its key's ID, or empty; `left_s` is the time until its deadline."""

    id: str
    region: str
    path: str
    body: bytes
    serving_class: str
    key: str
    left_s: float
    max_answer_bytes: int


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """`first_s` limits the time until the response starts, including queueing; `silent_s` a pause within it; `whole_s`
    the total."""

    first_s: float = 60.0
    silent_s: float = 30.0
    whole_s: float = 300.0
    max_bytes: int = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Status and headers; header names are in lower case."""

    status: int
    headers: Mapping[str, str]


class StreamBroken(Exception):
    """The response is incomplete; the text says why."""


class IngressUnreachable(StreamBroken):
    pass


class NoIdentity(Exception):
    """This host has no readable certificate of the control plane."""


async def accepted_request_send(
    work: AcceptedRequest, addresses: Mapping[str, Sequence[IngressAddress]], attempt: int
) -> AttemptResponse:
    """Sends it to an ingress of its region; each attempt uses the next ingress. Never raises if an ingress fails."""
    ingresses = addresses.get(work.region, ())
    if not ingresses:
        return AttemptResponse(None, sent=False, reason=f"region {work.region} has no ingress")
    headers = {
        "X-Switchyard-Class": work.serving_class,
        "X-Switchyard-Deadline-Ms": str(max(1, int(work.left_s * 1000))),
        "X-Request-Id": work.id,
    }
    if work.key:
        headers["Authorization"] = f"Bearer {sender_key_text(work.key, settings.SECRET_KEY)}"
    return await ingress_post(
        ingresses[attempt % len(ingresses)],
        work.path,
        work.body,
        headers,
        limit_s=max(0.0, work.left_s) + ANSWER_ROOM_S,
        max_bytes=work.max_answer_bytes,
    )


async def ingress_post(
    ingress: IngressAddress, path: str, body: bytes, headers: Mapping[str, str], *, limit_s: float, max_bytes: int
) -> AttemptResponse:
    """Posts a JSON body and waits for the whole response. Never raises if the other side fails."""
    limits: dict[str, Any] = {"limit_s": limit_s, "connect_s": CONNECT_LIMIT_S, "max_bytes": max_bytes}
    try:
        return _attempt(await whole_response(_place(ingress), path, body, headers, **limits))
    except (NotConnected, NoIdentity) as error:
        return AttemptResponse(None, sent=False, reason=_unreachable_text(ingress, error))
    except TimeoutError:
        return AttemptResponse(None, reason=f"no complete answer within {limit_s:.3g} s")
    except TooLong:
        return AttemptResponse(None, reason=f"the answer is longer than {max_bytes} bytes")
    except BrokenOff as error:
        return AttemptResponse(None, reason=_broken_text(error))


async def ingress_stream(
    ingress: IngressAddress, path: str, body: bytes, headers: Mapping[str, str], limits: StreamLimits
) -> AsyncGenerator[ResponseHead | bytes, None]:
    """Posts a JSON body. Yields the head first, then pieces of the body. Raises IngressUnreachable if nothing was sent.
    Raises StreamBroken if the ingress is silent for too long or closes the connection early."""
    try:
        async with _http_client(CONNECT_LIMIT_S) as client:
            request = _post_request(ingress, path, body, headers)
            async with aclosing(_response_parts(client, request, limits)) as parts:
                async for part in parts:
                    yield part
    except (httpx.ConnectError, httpx.ConnectTimeout, NoIdentity) as error:
        raise IngressUnreachable(_unreachable_text(ingress, error)) from None
    except httpx.TransportError as error:
        raise StreamBroken(_broken_text(error)) from None


def _attempt(response: WholeResponse) -> AttemptResponse:
    retry_after = response.header(b"retry-after")
    retry_after_s = float(retry_after[:6]) if retry_after.isascii() and retry_after.isdigit() else None
    return AttemptResponse(response.status, bytes(response.body), retry_after_s=retry_after_s)


async def _response_parts(
    client: httpx.AsyncClient, request: httpx.Request, limits: StreamLimits
) -> AsyncGenerator[ResponseHead | bytes, None]:
    clock = asyncio.get_running_loop().time
    ends_at = clock() + limits.whole_s
    # One timeout around the generator would also interrupt its caller between two pieces.
    response = await _limited(min(limits.first_s, limits.whole_s), client.send(request, stream=True))
    async with aclosing(response):
        yield ResponseHead(response.status_code, dict(response.headers))
        pieces, read_bytes = response.aiter_raw(), 0
        while piece := await _limited(min(limits.silent_s, ends_at - clock()), anext(pieces, b"")):
            read_bytes += len(piece)
            if read_bytes > limits.max_bytes:
                raise StreamBroken(f"the answer is longer than {limits.max_bytes} bytes")
            yield piece


async def _limited(limit_s: float, step: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(limit_s):
            return await step
    except TimeoutError:
        raise StreamBroken(f"no data within {max(0.0, limit_s):.3g} s") from None


def _http_client(connect_s: float) -> httpx.AsyncClient:
    """Raises NoIdentity if the web process, which creates the certificate, has never run with this home."""
    context = _NO_AUTHORITIES if settings.PLAIN_LINKS else own_identity().read()[1]
    return httpx.AsyncClient(timeout=httpx.Timeout(None, connect=connect_s), trust_env=False, verify=context)


def _place(ingress: IngressAddress) -> Place:
    """Raises NoIdentity."""
    if settings.PLAIN_LINKS:
        return Place(ingress.address, ingress.port)
    fleet, context = own_identity().read()
    name = IdentityName(fleet, IdentityKind.INGRESS, ingress.id).dns
    return Place(ingress.address, hop_port(ingress.port), context, name)


def _post_request(ingress: IngressAddress, path: str, body: bytes, headers: Mapping[str, str]) -> httpx.Request:
    """Built by hand, so that none of the client's own headers (Accept-Encoding, User-Agent) reaches an engine."""
    place = _place(ingress)
    # The server's certificate must have this name.
    extensions = {"sni_hostname": place.name} if place.tls else {}
    scheme = "https" if place.tls else "http"
    url = httpx.URL(scheme=scheme, host=place.address, port=place.port, raw_path=path.encode("ascii"))
    fixed = {"Content-Type": "application/json", "Connection": "close"}
    stated = httpx.Headers({**headers, **fixed}, encoding="latin-1")
    return httpx.Request("POST", url, headers=stated, content=body, extensions=extensions)


class OwnIdentity:
    """The control plane's certificate on this host. The web process writes it to this folder."""

    def __init__(self, folder: Path) -> None:
        self._identity = Identity(folder)
        self._known: tuple[object, tuple[str, ssl.SSLContext]] | None = None

    def read(self) -> tuple[str, ssl.SSLContext]:
        """Returns the fleet's name and the TLS context; reads changed files again. Raises NoIdentity if the certificate
        cannot be read."""
        stamp = self._identity.stamp()
        if self._known is None or self._known[0] != stamp:
            try:
                self._known = (stamp, (self._identity.fleet(), self._identity.client_context()))
            except (OSError, ValueError) as error:
                raise NoIdentity(str(error)) from error
        return self._known[1]


@cache
def own_identity() -> OwnIdentity:
    return OwnIdentity(settings.SWITCHYARD_HOME / "control")


def _unreachable_text(ingress: IngressAddress, error: Exception) -> str:
    where = f"the ingress {ingress.id} at {ingress.address}:{ingress.port}"
    return f"{where} cannot be reached: {str(error) or type(error).__name__}"


def _broken_text(error: Exception) -> str:
    return f"the answer broke off: {str(error) or type(error).__name__}"


BENCHMARK_ROLLOUT = {
    "strategy": "in_place", "surge": 0, "canary": False, "waves_percent": [100], "canary_bake_s": 0.0, "bake_s": 0.0,
    "min_healthy_s": 5.0, "max_failed_cells": 1, "auto_rollback": False, "progress_deadline_s": 3600.0,
}  # fmt: skip
"""Rollout settings of a deployment that serves only the benchmark."""


def benchmark_describe(deployment: str, region: str) -> BenchmarkTarget:
    """Describes the ready cells of a deployment in a region. Raises NoTarget if there is no such cell, cells differ, or
    the region is ambiguous."""
    row = Deployment.objects.filter(pk=deployment).first()
    if row is None:
        raise NoTarget(f"there is no deployment {deployment!r}")
    region = region or _only_region(row)
    cells = list(
        Cell.objects.filter(deployment=row, region=region, state=CellState.READY.value)
        .select_related("model_version")
        .order_by("id")
    )
    if not cells:
        raise NoTarget(f"{deployment} has no ready cell in {region}")
    versions = sorted({cell.model_version.reference for cell in cells})
    if len(versions) > 1:
        raise NoTarget(f"{deployment} serves {' and '.join(versions)} in {region}; measure after its rollout")
    engine = engine_on(cells[0].model_version, cells[0].instance_type_id)
    members = list(CellMember.objects.filter(cell__in=cells).select_related("node__report", "node__instance_type"))
    stacks = {stack_digest(member.node.fingerprint, engine) for member in members}
    kinds = {member.node.instance_type for member in members}
    if len(stacks) > 1 or len(kinds) > 1:
        what = "run different software (fingerprints differ)" if len(stacks) > 1 else "are of several instance types"
        raise NoTarget(f"the machines of {deployment} in {region} {what}, so a measurement would apply to neither")
    kind = kinds.pop()
    there = counted(CellRole(cell.role) for cell in cells)
    return BenchmarkTarget(
        deployment=deployment,
        region=region,
        version_id=cells[0].model_version_id,
        instance_type=kind.name,
        fingerprint=stacks.pop()[:16],
        cells=tuple(f"{cell.pk}#{cell.generation}" for cell in cells),
        machines=Machines(
            len(cells), kind.chips * len(members), kind.watts * len(members), kind.price_per_hour * len(members)
        ),
        in_flight=sum(_in_flight(member) for member in members if member.rank == 0),
        regions=tuple(sorted(place.region_id for place in row.regions.all() if place.cells)),
        split=split_text(there.prefill, there.decode, there.mixed) if there.is_apart else "",
        stated=_stated_cells(row, region),
    )


def _stated_cells(row: Deployment, region: str) -> Cells | None:
    """Returns the stated cells, or None if the autoscaler or the role planner decides their number."""
    place = row.regions.filter(region=region).first()
    stated = place.stated(plans_roles=row.plans_roles) if place is not None else None
    return None if stated is None or row.plans_roles or isinstance(stated, CellRange) else cells_as_json(stated)


def benchmark_enter(deployment: str, region: str) -> Entrance:
    """Returns the region's first ingress, with the control plane's certificate unless links are plain. Raises NoTarget
    if the region has no ingress, or this host has no certificate."""
    ingresses = ingress_addresses_by_region().get(region)
    if not ingresses:
        raise NoTarget(f"region {region} has no ingress")
    ingress = ingresses[0]
    headers = {"X-Switchyard-Class": "realtime"}
    if key_ring_version().required:
        headers["Authorization"] = f"Bearer {playground_key_text(settings.SECRET_KEY)}"
    if settings.PLAIN_LINKS:
        return Entrance(ingress.address, ingress.port, deployment, headers)
    try:
        fleet, context = own_identity().read()
    except NoIdentity as error:
        raise NoTarget(f"this host has no certificate of the control plane: {error}") from None
    name = IdentityName(fleet, IdentityKind.INGRESS, ingress.id).dns
    return Entrance(ingress.address, hop_port(ingress.port), deployment, headers, context, name)


def benchmark_serve(request: ServeRequest) -> Serving:
    """Rolls an unused deployment out to a version, all cells together and without bakes, after waiting for a running
    rollout. It first scales to mixed cells that serve the new version; splitting them by role comes last, because a
    rollout cannot replace the only cells of a role."""
    row = Deployment.objects.filter(pk=request.deployment).first()
    if row is None:
        return Serving(ServingState.REFUSED, f"deployment {request.deployment!r} no longer exists")
    rollout = Rollout.objects.filter(deployment=row).select_related("to_version").order_by("-id").first()
    if rollout is not None and rollout.state in ACTIVE:
        return _under_way(rollout, request)
    if rollout is not None and _has_failed(rollout, request):
        return Serving(ServingState.REFUSED, f"its rollout is {rollout.state}: {rollout.reason}")
    served = _serving_state(row, request)
    if request.cells is not None:
        cells = request.cells if served is not None else cells_count(request.cells)
        if moving := _scale_cells(row, request, cells):
            return moving
    return served or _start_rollout(row, request)


def _scale_cells(row: Deployment, request: ServeRequest, wanted: Cells) -> Serving | None:
    """Scales to these cells; None keeps the number. Returns the state, ready once all of them serve."""
    try:
        cells = parse_cells(wanted, "cells")
        scales = deployment_scale(name=row.name, cells={request.region: cells}, actor=request.actor, now=request.now)
    except (InvalidScaling, InvalidInput) as refused:
        return Serving(ServingState.REFUSED, str(refused))
    pools = cells if isinstance(cells, CellPools) else CellPools(0, 0, cells_count(wanted))
    there = Cell.objects.filter(deployment=row, region=request.region).exclude(state=CellState.STOPPED.value)
    roles = counted(CellRole(cell.role) for cell in there)
    is_ready = all(cell.state == CellState.READY for cell in there)
    if not scales and is_ready and roles == RoleSplit(pools.mixed, pools.prefill, pools.decode):
        return None
    return Serving(ServingState.MOVING, f"scaling to {cells_to_text(cells)}; it has {roles}")


def _has_failed(rollout: Rollout, request: ServeRequest) -> bool:
    is_ours = rollout.to_version.reference == request.version and rollout.created_at >= request.since
    return is_ours and rollout.state != RolloutState.SUCCEEDED


def _under_way(rollout: Rollout, request: ServeRequest) -> Serving:
    if rollout.to_version.reference != request.version:
        if rollout.actor != request.actor or rollout.state != RolloutState.PAUSED:
            return Serving(ServingState.MOVING, f"waiting for {rollout}: {rollout.reason}")
        return _start_rollout(rollout.deployment, request)
    if rollout.state == RolloutState.PAUSED:
        return Serving(ServingState.REFUSED, f"its rollout is paused: {rollout.reason}")
    return Serving(ServingState.MOVING, f"{rollout} to {request.version}: {rollout.reason}")


def _serving_state(row: Deployment, request: ServeRequest) -> Serving | None:
    """Returns whether all cells run the version and are ready, or None if a rollout is needed."""
    cells = list(
        Cell.objects.filter(deployment=row).exclude(state=CellState.STOPPED.value).select_related("model_version")
    )
    if row.model_version.reference != request.version or any(
        cell.model_version.reference != request.version for cell in cells
    ):
        return None
    ready = sum(cell.state == CellState.READY for cell in cells)
    wanted = sum(place.cells_in_force for place in row.regions.all())
    if ready >= max(1, wanted):
        return Serving(ServingState.SERVES)
    return Serving(ServingState.MOVING, f"{ready} of {wanted} cells are ready")


def _start_rollout(row: Deployment, request: ServeRequest) -> Serving:
    cells = max(1, sum(place.cells_in_force for place in row.regions.all()))
    policy = {**BENCHMARK_ROLLOUT, "max_unavailable": cells}
    try:
        proposal = rollout_propose(deployment=row.name, version=request.version, policy=policy, allow_unreleased=True)
        rollout = rollout_start(proposal=proposal, actor=request.actor, now=request.now, why="for a benchmark")
    except (InvalidInput, Conflict) as refused:
        return Serving(ServingState.REFUSED, str(refused))
    return Serving(ServingState.MOVING, f"{rollout} to {request.version} begins")


def _only_region(row: Deployment) -> str:
    regions = sorted(place.region_id for place in row.regions.all() if place.cells)
    if len(regions) != 1:
        listed = ", ".join(regions) or "no region"
        raise NoTarget(f"{row.name} has cells in {listed}; name the region to measure")
    return regions[0]


def _in_flight(member: CellMember) -> int:
    report = getattr(member.node, "report", None)
    return int((report.load or {}).get("in_flight", 0)) if report else 0
