"""The HTTP endpoints for nodes: builds, weights, compile caches, and which nodes hold them. Each needs the credential
of a node of this fleet."""

import re
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path

import msgspec
from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_http_methods

from engine_agent.protocol.compile_caches import (
    DIGEST_HEADER,
    PART_BYTES,
    UNPACKED_HEADER,
    CacheFacts,
    parse_end,
    parse_range,
    parse_unpacked,
)
from engine_agent.protocol.manifest import DIGEST_PREFIX, MANIFEST_NAME, BadArtifact, is_sha256
from engine_agent.protocol.states import AgentKind
from fleet.agents.api.downloads import bearer_token, download_file, stream_file
from fleet.agents.selectors import cache_place, is_under_suspicion
from fleet.agents.services.enrolment import agents_identify
from fleet.nodes.selectors import holders_of
from kernel import clock
from kernel.addresses import client_network
from kernel.refusals import Conflict, Refusal
from kernel.rest.throttling import count_request
from models_registry.artifacts.planner import parse_place
from models_registry.artifacts.services.sources import SourceTrouble
from models_registry.builds.selectors import build_file
from models_registry.compile_caches.models import CompileCache
from models_registry.compile_caches.selectors import CachePlace, cache_find, cache_room_bytes
from models_registry.compile_caches.services import (
    BadUpload,
    CacheArchive,
    TooEarly,
    TooLarge,
    cache_check_wanted,
    cache_finish,
    cache_open,
    cache_part_store,
    cache_use,
)
from models_registry.versions.selectors import weights_handed_out

FIRST_BYTE = re.compile(r"bytes=([0-9]{1,15})-")
FETCHES_PER_MIN = 6000
"""Of one network: a hundred hosts behind one address fetch 40 parts each."""
HOLDERS_PER_MIN = 600
"""Of one network: a hundred hosts behind one address fetch something each. Each answer can read a region's reports."""


@require_GET
def build(request: HttpRequest, digest: str, name: str) -> HttpResponseBase:
    """`GET /agents/builds/SHA256/NAME`: the manifest, facts or a part of an engine build in a folder of this host, by
    the credential of a node; with `Range: bytes=N-` from there. 403, 404, 416, 429."""
    if isinstance(refusal := _calling_node(request), HttpResponse):
        return refusal
    path = build_file(digest, name, map(parse_place, settings.ARTIFACT_SOURCES))
    return _file_from(request, path, "build")


@require_GET
def artifact(request: HttpRequest, digest: str, name: str = "") -> HttpResponseBase:
    """`GET /agents/artifacts/SHA256/NAME`: a file of a version's weights in a folder of this host, as `build`. Without
    NAME: the size of each file, as JSON."""
    if isinstance(refusal := _calling_node(request), HttpResponse):
        return refusal
    files = weights_handed_out(digest, map(parse_place, settings.ARTIFACT_SOURCES))
    if files and not name:
        return JsonResponse({path: file.stat().st_size for path, file in files.items() if path != MANIFEST_NAME})
    return _file_from(request, files.get(name), "artifact")


@require_GET
def holders(request: HttpRequest, digest: str) -> HttpResponseBase:
    """`GET /agents/holders/SHA256`: nodes that hold a build, weights or the archive of a compile cache, from which the
    calling node may fetch it, as JSON. 403, 429."""
    if isinstance(node := _calling_node(request, "agent-holders", HOLDERS_PER_MIN), HttpResponse):
        return node
    found = holders_of(digest, node) if is_sha256(digest) else ()
    return JsonResponse(msgspec.to_builtins(found), safe=False)


def _calling_node(
    request: HttpRequest, counted: str = "agent-fetch", per_min: int = FETCHES_PER_MIN
) -> str | HttpResponse:
    """The node that calls, or why it may fetch nothing now."""
    network = client_network(str(request.META.get("REMOTE_ADDR", "")))
    rate = count_request(counted, network, per_min)
    if rate is not None and rate.count > rate.limit:
        answer = {"error": "too many requests from one network"}
        return JsonResponse(answer, status=429, headers={"Retry-After": str(rate.reset_s)})
    [identity] = agents_identify([bearer_token(request)])
    if identity is None or identity.kind is not AgentKind.NODE:
        return JsonResponse({"error": "only nodes of this fleet may download builds and weights"}, status=403)
    return identity.id


def _file_from(request: HttpRequest, path: Path | None, what: str) -> HttpResponseBase:
    if path is None:
        return JsonResponse({"error": f"this host of the control plane has no such {what}"}, status=404)
    first = FIRST_BYTE.fullmatch(request.headers.get("Range", ""))
    return download_file(path, int(first[1]) if first else 0, "application/octet-stream", {})


CACHE_REQUESTS_PER_MIN = 6000
"""Of one network: a hundred hosts behind one address upload or fetch 400 MB each."""


CACHE_REFUSALS: Mapping[type[Refusal], int] = {BadUpload: 400, Conflict: 409, TooLarge: 413, TooEarly: 425}


@csrf_exempt  # agents send a credential, never a cookie
@require_http_methods(["GET", "PUT"])
def compile_cache(request: HttpRequest, key: str) -> HttpResponse:
    """`GET` and `PUT /agents/caches/KEY` by the credential of a node in a cell, as in
    `engine_agent.protocol.compile_caches`. 400, 403, 404, 409, 413, 425, 429."""
    place = _cache_caller(request, key)
    if isinstance(place, HttpResponse):
        return place
    if request.method == "GET":
        if (row := _cache_for(place, key)) is None:
            return _no_cache()
        cache_use(row, now=clock.now())
        digest = row.digest.removeprefix(DIGEST_PREFIX)
        return JsonResponse(msgspec.to_builtins(CacheFacts(digest, row.packed_bytes, row.unpacked_bytes)))
    try:
        return JsonResponse({"next": _store_part(request, place, key)})
    except Refusal as refusal:
        return JsonResponse({"error": str(refusal)}, status=CACHE_REFUSALS.get(type(refusal), 400))


@require_GET
def cache_archive(request: HttpRequest, key: str) -> HttpResponseBase:
    """`GET /agents/caches/KEY/archive` by the credential of a node in a cell that may have this cache. 403, 404, 429,
    503."""
    place = _cache_caller(request, key)
    if isinstance(place, HttpResponse):
        return place
    row = _cache_for(place, key)
    try:
        found = cache_open(row.digest) if row is not None else None
    except (BadArtifact, SourceTrouble) as error:
        return JsonResponse({"error": str(error)}, status=HTTPStatus.SERVICE_UNAVAILABLE)
    return stream_file(*found, 0, "application/octet-stream", {}) if found is not None else _no_cache()


def _cache_caller(request: HttpRequest, key: str) -> CachePlace | HttpResponse:
    """The place of the node that calls, or why it may share no caches now."""
    network = client_network(str(request.META.get("REMOTE_ADDR", "")))
    rate = count_request("agent-cache", network, CACHE_REQUESTS_PER_MIN)
    if rate is not None and rate.count > rate.limit:
        answer = {"error": "too many requests from one network"}
        return JsonResponse(answer, status=429, headers={"Retry-After": str(rate.reset_s)})
    [identity] = agents_identify([bearer_token(request)])
    is_node = identity is not None and identity.kind is AgentKind.NODE
    place = cache_place(identity.id) if identity is not None and is_node else None
    if place is None or not is_sha256(key) or cache_room_bytes() == 0:
        message = "only nodes in a cell may share compile caches" if cache_room_bytes() else "none are shared here"
        return JsonResponse({"error": message}, status=403)
    return place


def _cache_for(place: CachePlace, key: str) -> CompileCache | None:
    """The cache that this node may have, unless the node that compiled it is under suspicion."""
    row = cache_find(place, key)
    return row if row is not None and not is_under_suspicion(row.node) else None


def _no_cache() -> JsonResponse:
    return JsonResponse({"error": "there is no compile cache for it"}, status=404)


def _store_part(request: HttpRequest, place: CachePlace, key: str) -> int:
    """Returns the byte that must follow. Raises Conflict, TooLarge, TooEarly or BadUpload."""
    content = request.read(PART_BYTES + 1)
    stated, unpacked = request.headers.get("Content-Range", ""), parse_unpacked(request.headers.get(UNPACKED_HEADER))
    part, end = parse_range(stated), parse_end(stated) if not content else None
    if not content and not stated:
        cache_check_wanted(place, key, now=clock.now())
        return 0
    total = part.total if part is not None else end
    if total is None or unpacked is None:
        raise BadUpload(f"a part needs Content-Range, {DIGEST_HEADER} and {UNPACKED_HEADER}")
    archive = CacheArchive(key, total, request.headers.get(DIGEST_HEADER, ""), unpacked)
    if part is None:
        return cache_finish(place, archive, now=clock.now())
    return cache_part_store(place, archive, part, content, now=clock.now())
