"""The HTTP endpoints for hosts: join scripts, agent archives, the reachability check, join failures, and the
attestation of EC2 machines. Browsers and users never call them. The archive and the check need the token of an open
invitation; a release needs a machine's credential; builds, weights and compile caches a node's."""

import asyncio
import ipaddress
import os
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any

import msgspec
from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse, StreamingHttpResponse
from django.template.loader import render_to_string
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from audit.middleware import audit_exempt
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
from engine_agent.protocol.ports import HIGHEST_PORT, LOWEST_PORT
from engine_agent.protocol.states import AgentKind
from fleet.agents.planner import BadProof, ProofRefused
from fleet.agents.selectors import cache_place, is_under_suspicion, server_pin, trust_now
from fleet.agents.services.enrolment import RETRY_AFTER_S, NotYet, agents_identify, machine_attest
from fleet.clouds.aws.identity import sts_host
from fleet.deployments.selectors import builds_needed
from fleet.machines.models import Invitation
from fleet.machines.services.machines import InvitationRefused, invitation_open, is_ticket, join_refused
from fleet.nodes.selectors import holders_of
from fleet.reconcile.planning.states import MachineRole
from fleet.releases.services.archive import (
    AgentArchive,
    ArchiveUnavailable,
    CarriedPython,
    archive_by_digest,
    archive_of,
    archives,
    carried_python,
    carried_pythons,
)
from fleet.releases.services.releases import handed_out_release
from kernel import clock
from kernel.addresses import client_network
from kernel.decoding import decode_json
from kernel.outside_transaction import run_outside_transaction
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

MAX_BODY_BYTES = 2048
NONCE = re.compile(r"[0-9a-f]{32}")
ORIGIN = re.compile(r"https?://[A-Za-z0-9.:\[\]-]{1,260}")
REACH_LIMIT_S = 3.0
CHECKS_AT_ONCE = 4
PORTS = range(LOWEST_PORT, HIGHEST_PORT + 1)

CHUNK_BYTES = 256 * 1024
DOWNLOADS_AT_ONCE = 16
"""Of one web process: 4 MiB of chunks. Further downloads get 429."""

_downloading = threading.BoundedSemaphore(DOWNLOADS_AT_ONCE)
_checking = threading.BoundedSemaphore(CHECKS_AT_ONCE)


@require_GET
def script(request: HttpRequest) -> HttpResponse:
    """`GET /join`: the shell script of the join command. 200 text; 400 for an invalid host name."""
    origin = f"{request.scheme}://{request.get_host()}"
    if not ORIGIN.fullmatch(origin):
        return HttpResponse("the host name is invalid\n", status=400)
    known = archives(handed_out_release())
    context = {
        "server": origin, "pin": server_pin(clock.now()), "archives": known, "pythons": carried_pythons(),
    }  # fmt: skip
    return HttpResponse(render_to_string("join.sh", context), content_type="text/x-shellscript; charset=utf-8")


@require_GET
def archive(request: HttpRequest, tag: str) -> HttpResponseBase:
    """`GET /agents/join/archive/TAG`: the agent for one Python and processor, or a Python (`python-x86_64`). 403
    without an invitation, 404, 429."""
    found = _open_invitation(request)
    if isinstance(found, HttpResponse):
        return found
    kind, _, processor = tag.partition("-")
    try:
        known = carried_python(processor) if kind == "python" else archive_of(tag, handed_out_release())
    except ArchiveUnavailable as missing:
        return JsonResponse({"error": str(missing)}, status=404)
    return _download_response(known)


@require_GET
def release(request: HttpRequest, release: str, digest: str) -> HttpResponseBase:
    """`GET /agents/releases/ID/SHA256`: an archive that a machine's order names, by the machine's credential. 403, 404,
    429."""
    network = client_network(str(request.META.get("REMOTE_ADDR", "")))
    if (limited := _too_often("agent-release", network)) is not None:
        return limited
    [identity] = agents_identify([_bearer_token(request)])
    if identity is None or identity.kind is not AgentKind.MACHINE:
        return JsonResponse({"error": "only machines of this fleet may download releases"}, status=403)
    known = archive_by_digest(digest, release)
    if known is None:
        return JsonResponse({"error": "this host of the control plane has no such archive"}, status=404)
    return _download_response(known)


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
    [identity] = agents_identify([_bearer_token(request)])
    if identity is None or identity.kind is not AgentKind.NODE:
        return JsonResponse({"error": "only nodes of this fleet may download builds and weights"}, status=403)
    return identity.id


def _file_from(request: HttpRequest, path: Path | None, what: str) -> HttpResponseBase:
    if path is None:
        return JsonResponse({"error": f"this host of the control plane has no such {what}"}, status=404)
    first = FIRST_BYTE.fullmatch(request.headers.get("Range", ""))
    return _download_file(path, int(first[1]) if first else 0, "application/octet-stream", {})


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
    return _stream(*found, 0, "application/octet-stream", {}) if found is not None else _no_cache()


def _cache_caller(request: HttpRequest, key: str) -> CachePlace | HttpResponse:
    """The place of the node that calls, or why it may share no caches now."""
    network = client_network(str(request.META.get("REMOTE_ADDR", "")))
    rate = count_request("agent-cache", network, CACHE_REQUESTS_PER_MIN)
    if rate is not None and rate.count > rate.limit:
        answer = {"error": "too many requests from one network"}
        return JsonResponse(answer, status=429, headers={"Retry-After": str(rate.reset_s)})
    [identity] = agents_identify([_bearer_token(request)])
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


class _Download:
    """A file in chunks, read by threads. Its slot is released when the response is closed or garbage-collected:
    Django drops a response without closing it if the host disconnected while the view ran, or if the file became
    unreadable."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._is_open = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while chunk := await asyncio.to_thread(self._file.read, CHUNK_BYTES):
            yield chunk

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._file.close()
            _downloading.release()

    def __del__(self) -> None:
        self.close()


def _download_response(archive: AgentArchive | CarriedPython) -> HttpResponseBase:
    return _download_file(archive.path, 0, "application/gzip", {"X-Content-SHA256": archive.digest})


def _download_file(path: Path, first: int, kind: str, headers: dict[str, str]) -> HttpResponseBase:
    """The file from this byte on."""
    file = path.open("rb")
    return _stream(file, os.fstat(file.fileno()).st_size, first, kind, headers)


def _stream(file: IO[bytes], length: int, first: int, kind: str, headers: dict[str, str]) -> HttpResponseBase:
    if first and first >= length:
        file.close()
        return HttpResponse(status=416, headers={"Content-Range": f"bytes */{length}"})
    if not _downloading.acquire(blocking=False):
        file.close()
        answer = {"error": "too many downloads; try again"}
        return JsonResponse(answer, status=503, headers={"Retry-After": "5"})
    if first:
        file.seek(first)
    stated = {"Content-Length": str(length - first), **headers}
    stated |= {"Content-Range": f"bytes {first}-{length - 1}/{length}"} if first else {}
    return StreamingHttpResponse(_Download(file), content_type=kind, headers=stated, status=206 if first else 200)


@audit_exempt("it waits for the host, and changes nothing")
@csrf_exempt  # hosts send a token, never a cookie
@require_POST
def check(request: HttpRequest) -> HttpResponse:
    """`POST /agents/join/check` {"port", "nonce"}: returns the invitation's target, this clock, the caller's address as
    seen here, the fleet's authorities, and whether a connection to that port of that address reaches a process that
    knows the nonce.

    `port` 0 makes no connection, and only the caller's address is ever connected to. `machine` and `cloud`: of a
    machine that a cloud launched, else "". `builds`: those that deployments there name (`NeededBuild`)."""
    found = _open_invitation(request)
    if isinstance(found, HttpResponse):
        return found
    body = _json_body(request)
    port, nonce = body.get("port"), body.get("nonce")
    if type(port) is not int or not (port == 0 or port in PORTS) or not NONCE.fullmatch(str(nonce)):
        message = 'the body must be {"port": 0 or 1024 to 65535, "nonce": 32 hexadecimal digits}'
        return JsonResponse({"error": message}, status=400)
    address = str(request.META.get("REMOTE_ADDR", ""))
    trouble, machine = "", found.machine
    if machine is not None and machine.address != address:
        port, address = 0, machine.address  # behind a NAT; the cloud states its own address
    if port:
        if not _checking.acquire(timeout=REACH_LIMIT_S):
            answer = {"error": "too many checks; try again"}
            return JsonResponse(answer, status=503, headers={"Retry-After": "3"})
        try:
            trouble = _trouble_reaching(address, port, str(nonce))
        finally:
            _checking.release()
    trust, is_node = trust_now(), found.role == MachineRole.NODE
    builds = builds_needed(found.region_id, found.instance_type_id or "") if is_node else ()
    return JsonResponse(
        {
            "region": found.region_id,
            "role": found.role,
            "instance_type": found.instance_type_id or "",
            "address": address,
            "machine": machine.id if machine is not None else "",
            "cloud": machine.provider if machine is not None else "",
            "time": time.time(),
            "bundle": trust.bundle if trust and not settings.PLAIN_LINKS else "",
            "trouble": trouble,
            "builds": msgspec.to_builtins(builds),
        }
    )


@csrf_exempt  # hosts send a token, never a cookie
@require_POST
def refused(request: HttpRequest) -> HttpResponse:
    """`POST /agents/join/refused` {"reason"}: records why a host did not join. 204."""
    network = client_network(str(request.META.get("REMOTE_ADDR", "")))
    if (limited := _too_often("join-refused", network)) is not None:
        return limited
    reason = _json_body(request).get("reason")
    if isinstance(reason, str) and reason:
        join_refused(token=_bearer_token(request), address=network, reason=reason, now=clock.now())
    return HttpResponse(status=204)


def _trouble_reaching(address: str, port: int, nonce: str) -> str:
    """Returns why the host is unreachable, or ""."""
    try:
        ipaddress.ip_address(address)
        with socket.create_connection((address, port), timeout=REACH_LIMIT_S) as connection:
            connection.settimeout(REACH_LIMIT_S)
            received = connection.recv(len(nonce))
    except (OSError, ValueError):
        return f"nothing answers at {address}:{port}"
    return "" if received.decode("ascii", "replace") == nonce else f"something else answers at {address}:{port}"


def _open_invitation(request: HttpRequest) -> Invitation | HttpResponse:
    network = client_network(str(request.META.get("REMOTE_ADDR", "")))
    token = _bearer_token(request)
    limited = _too_often("join", network)
    if limited is not None and is_ticket(token):
        limited = _too_often("join-ticket", token)
    if limited is not None:
        return limited
    now = clock.now()
    try:
        return invitation_open(_bearer_token(request), now=now)
    except InvitationRefused as reason:
        join_refused(token=_bearer_token(request), address=network, reason=str(reason), now=now)
        return JsonResponse({"error": str(reason)}, status=403)


def _too_often(kind: str, network: str) -> HttpResponse | None:
    """Limits each network, whatever the token: a hundred hosts may join from one address together."""
    rate = count_request(kind, network, settings.API_ANONYMOUS_REQUESTS_PER_MIN)
    if rate is None or rate.count <= rate.limit:
        return None
    message = f"too many requests from one network; try again in {rate.reset_s} s"
    return JsonResponse({"error": message}, status=429, headers={"Retry-After": str(rate.reset_s)})


def _bearer_token(request: HttpRequest) -> str:
    return request.headers.get("Authorization", "").partition(" ")[2].strip()


def _json_body(request: HttpRequest) -> dict[str, Any]:
    try:
        body = decode_json(request.body) if len(request.body) <= MAX_BODY_BYTES else None
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


# Requests of an EC2 machine before it joins: the script that proves its identity, and the ticket for the proof.
# With the ticket it joins like any host.

ATTESTATIONS_PER_MIN = 3000
"""Of one network: a thousand machines may share a NAT and start together."""


@require_GET
def aws_script(request: HttpRequest) -> HttpResponse:
    """`GET /join/aws`: the shell script that user data downloads and runs. 200 text; 400 for an invalid host name."""
    origin = f"{request.scheme}://{request.get_host()}"
    if not ORIGIN.fullmatch(origin):
        return HttpResponse("the host name is invalid\n", status=400)
    program = (Path(settings.BASE_DIR) / "templates/aws/attest.py").read_text(encoding="utf-8")
    context = {"server": origin, "pin": server_pin(clock.now()), "sts_host": sts_host("REGION"), "attest": program}
    return HttpResponse(render_to_string("aws/join.sh", context), content_type="text/x-shellscript; charset=utf-8")


@csrf_exempt  # machines send a proof, never a cookie
@require_POST
def attest(request: HttpRequest) -> HttpResponse:
    """`POST /agents/join/attest` {"unit", "address", "headers"}: a machine's proof. 200 {"ticket"}; 400: malformed;
    403: rejected; 411: no Content-Length; 429: too many from one network; 503 with Retry-After: cannot be checked now.
    """
    network = client_network(str(request.META.get("REMOTE_ADDR", "")))
    rate = run_outside_transaction("rate", lambda: count_request("attest", network, ATTESTATIONS_PER_MIN))
    if rate is not None and rate.count > rate.limit:
        return _attestation_error("too many proofs from one network; try again in a minute", 429, rate.reset_s)
    if "HTTP_TRANSFER_ENCODING" in request.META:
        return _attestation_error("Content-Length is required", 411)
    now = clock.now()
    try:
        return JsonResponse({"ticket": machine_attest(request.body, now=now)})
    except BadProof as bad:
        return _attestation_error(str(bad), 400)
    except NotYet as missing:
        return _attestation_error(str(missing), 503, RETRY_AFTER_S)
    except ProofRefused as refusal:
        join_refused(token="", address=network, reason=str(refusal), now=now)
        return _attestation_error(str(refusal), 403)


def _attestation_error(error: str, status: int, retry_after_s: int | None = None) -> HttpResponse:
    headers = {"Retry-After": str(retry_after_s)} if retry_after_s is not None else {}
    return JsonResponse({"error": error}, status=status, headers=headers)
