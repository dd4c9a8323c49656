"""The HTTP endpoints for hosts that join: join scripts, agent archives, the reachability check, join failures, and the
attestation of EC2 machines. Browsers and users never call them. The archive and the check need the token of an open
invitation; a release needs a machine's credential."""

import ipaddress
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.template.loader import render_to_string
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_POST

from audit.middleware import audit_exempt
from engine_agent.protocol.ports import HIGHEST_PORT, LOWEST_PORT
from engine_agent.protocol.states import AgentKind
from fleet.agents.api.downloads import bearer_token, download_response
from fleet.agents.planner import BadProof, ProofRefused
from fleet.agents.selectors import server_pin, trust_now
from fleet.agents.services.enrolment import RETRY_AFTER_S, NotYet, agents_identify, machine_attest
from fleet.clouds.aws.identity import sts_host
from fleet.deployments.selectors import builds_needed
from fleet.machines.models import Invitation
from fleet.machines.services.machines import InvitationRefused, invitation_open, is_ticket, join_refused
from fleet.reconcile.planning.states import MachineRole
from fleet.releases.services.archive import (
    ArchiveUnavailable,
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
from kernel.rest.throttling import count_request

MAX_BODY_BYTES = 2048
NONCE = re.compile(r"[0-9a-f]{32}")
ORIGIN = re.compile(r"https?://[A-Za-z0-9.:\[\]-]{1,260}")
REACH_LIMIT_S = 3.0
CHECKS_AT_ONCE = 4
PORTS = range(LOWEST_PORT, HIGHEST_PORT + 1)

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
    return download_response(known)


@require_GET
def release(request: HttpRequest, release: str, digest: str) -> HttpResponseBase:
    """`GET /agents/releases/ID/SHA256`: an archive that a machine's order names, by the machine's credential. 403, 404,
    429."""
    network = client_network(str(request.META.get("REMOTE_ADDR", "")))
    if (limited := _too_often("agent-release", network)) is not None:
        return limited
    [identity] = agents_identify([bearer_token(request)])
    if identity is None or identity.kind is not AgentKind.MACHINE:
        return JsonResponse({"error": "only machines of this fleet may download releases"}, status=403)
    known = archive_by_digest(digest, release)
    if known is None:
        return JsonResponse({"error": "this host of the control plane has no such archive"}, status=404)
    return download_response(known)


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
        join_refused(token=bearer_token(request), address=network, reason=reason, now=clock.now())
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
    token = bearer_token(request)
    limited = _too_often("join", network)
    if limited is not None and is_ticket(token):
        limited = _too_often("join-ticket", token)
    if limited is not None:
        return limited
    now = clock.now()
    try:
        return invitation_open(bearer_token(request), now=now)
    except InvitationRefused as reason:
        join_refused(token=bearer_token(request), address=network, reason=str(reason), now=now)
        return JsonResponse({"error": str(reason)}, status=403)


def _too_often(kind: str, network: str) -> HttpResponse | None:
    """Limits each network, whatever the token: a hundred hosts may join from one address together."""
    rate = count_request(kind, network, settings.API_ANONYMOUS_REQUESTS_PER_MIN)
    if rate is None or rate.count <= rate.limit:
        return None
    message = f"too many requests from one network; try again in {rate.reset_s} s"
    return JsonResponse({"error": message}, status=429, headers={"Retry-After": str(rate.reset_s)})


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
