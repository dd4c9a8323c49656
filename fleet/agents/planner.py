"""Checks the proof of an EC2 machine's identity, and plans the rotation of the fleet's authorities. Pure. A proof is a
signed STS request (`templates/aws/attest.py`) that the control plane sends in the machine's place; STS alone says who
signed it. Method, path, body and content type are never taken from a proof, so that it cannot cause another request.
This module checks the proof before that request, and STS's answer. A new authority starts as `next`: it is in every
bundle and signs nothing. Once every certificate holder trusts it, it becomes `current` and signs. The previous one
stays trusted until its last certificate has expired."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from kernel.decoding import decode_json

VALID_FOR = timedelta(minutes=15)
"""STS rejects signatures that are older or further in the future."""
BODY_BYTES = 8192
BODY = "Action=GetCallerIdentity&Version=2011-06-15"
CONTENT_TYPE = "application/x-www-form-urlencoded; charset=utf-8"
SIGNED_HEADERS = "content-type;host;x-amz-date;x-amz-security-token;x-switchyard-server"

_FORMS = {
    "authorization": re.compile(
        r"AWS4-HMAC-SHA256 Credential=[A-Z0-9]{16,128}/(?P<day>[0-9]{8})/(?P<region>[a-z0-9-]{1,32})/sts/aws4_request, "
        r"SignedHeaders=(?P<signed>[a-z0-9;-]{1,200}), Signature=[0-9a-f]{64}"
    ),
    "host": re.compile(r"[A-Za-z0-9.:-]{1,260}"),
    "x-amz-date": re.compile(r"[0-9]{8}T[0-9]{6}Z"),
    "x-amz-security-token": re.compile(r"[A-Za-z0-9+/=_-]{1,4096}"),
    "x-switchyard-server": re.compile(r"(?P<server>[A-Za-z0-9.:\[\]-]{1,260});(?P<nonce>[0-9a-f]{64})"),
}
_UNIT = re.compile(r"[a-z0-9-]{1,64}")
_ADDRESS = re.compile(r"[0-9.]{7,15}")
_ARN = re.compile(
    r"arn:aws[a-z-]{0,16}:sts::(?P<account>[0-9]{12}):assumed-role/(?P<role>[A-Za-z0-9_+=,.@-]{1,64})/"
    r"(?P<instance>i-[0-9a-f]{17}|[0-9a-f]{32})"
)


class BadProof(Exception):
    """Not a proof; the text says why."""


class ProofRefused(Exception):
    """The proof is not accepted; the text says why."""


@dataclass(frozen=True, slots=True)
class Proof:
    """A signed STS request. `nonce_digest`: SHA-256 of a secret of that machine. `unit` and `address` are unproven
    statements of the machine."""

    region: str
    host: str
    server: str
    nonce_digest: str
    signed_at: datetime
    headers: Mapping[str, str]
    unit: str
    address: str


@dataclass(frozen=True, slots=True)
class Caller:
    """The signer: an EC2 instance with the role of its profile, or a task of ECS with its task role. `instance`: ID of
    the instance or the task."""

    account: str
    role: str
    instance: str

    @property
    def provider(self) -> str:
        """The provider of such machines."""
        return "aws" if self.instance.startswith("i-") else "ecs"


def read_proof(body: bytes) -> Proof:
    """Parses a proof. Raises BadProof if it is too long, not JSON with exactly these members, or has a value that AWS
    never produces."""
    if len(body) > BODY_BYTES:
        raise BadProof(f"the proof has {len(body)} bytes; the limit is {BODY_BYTES}")
    try:
        given = decode_json(body)
    except ValueError as error:
        raise BadProof(f"the proof is not JSON: {error}") from None
    given = _json_members(given, ("address", "headers", "unit"), "the proof")
    headers = _json_members(given["headers"], tuple(sorted(_FORMS)), "headers")
    found = {name: _require_match(form, headers[name], name) for name, form in _FORMS.items()}
    _require_match(_UNIT, given["unit"], "unit")
    _require_match(_ADDRESS, given["address"], "address")
    authorization, server = found["authorization"], found["x-switchyard-server"]
    if authorization["signed"] != SIGNED_HEADERS:
        raise BadProof(f"the signature covers the headers {authorization['signed']}; it must cover {SIGNED_HEADERS}")
    try:
        signed_at = datetime.strptime(headers["x-amz-date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        raise BadProof(f"x-amz-date {headers['x-amz-date']} is not a date") from None
    if not headers["x-amz-date"].startswith(authorization["day"]):
        raise BadProof("x-amz-date is of another day than the signature's key")
    return Proof(
        region=authorization["region"],
        host=headers["host"],
        server=server["server"].lower(),
        nonce_digest=server["nonce"],
        signed_at=signed_at,
        headers=headers,
        unit=given["unit"],
        address=given["address"],
    )


def _json_members(value: Any, names: tuple[str, ...], what: str) -> dict[str, Any]:
    if not isinstance(value, dict) or tuple(sorted(value)) != names:
        raise BadProof(f"{what} must have the members {', '.join(names)} and no others")
    return value


def _require_match(form: re.Pattern[str], value: object, name: str) -> re.Match[str]:
    match = form.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise BadProof(f"{name} does not match {form.pattern}")
    return match


def check_proof(proof: Proof, *, servers: frozenset[str], sts_host: str, now: datetime) -> None:
    """Checks that a proof is for this control plane, current, and for the STS of its region. `servers`: this control
    plane's names as machines know them, in lower case (`host` or `host:port`). Raises ProofRefused if it is not."""
    if proof.server not in servers:
        names = ", ".join(sorted(servers))
        raise ProofRefused(f"the proof was signed for the server {proof.server}, and this one is {names}")
    if abs(now - proof.signed_at) > VALID_FOR:
        raise ProofRefused(
            f"the proof was signed at {proof.signed_at:%Y-%m-%d %H:%M:%S} UTC; that must be within "
            f"{VALID_FOR.total_seconds() / 60:.0f} minutes of now, {now:%H:%M:%S} UTC"
        )
    if proof.host != sts_host:
        raise ProofRefused(f"the proof is a request to {proof.host[:80]}, not to {sts_host}")


def read_caller(arn: str) -> Caller:
    """Returns the signer from the ARN in STS's answer. AWS alone names the sessions of instance profiles and task
    roles, after the instance or the task. Raises ProofRefused if it is a user's, or of another kind of session."""
    match = _ARN.fullmatch(arn)
    if match is None:
        raise ProofRefused(f"the proof was signed by {arn[:120]}, which is not a machine")
    return Caller(match["account"], match["role"], match["instance"])


class AuthorityState(StrEnum):
    NEXT = "next"
    CURRENT = "current"
    PREVIOUS = "previous"


@dataclass(frozen=True, slots=True)
class AuthorityView:
    """`in_use_until`: when its last unrevoked certificate expires; None if it has none."""

    id: int
    state: AuthorityState
    in_use_until: datetime | None


@dataclass(frozen=True, slots=True)
class Promote:
    """The next authority starts to sign."""

    id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Drop:
    """This authority is no longer trusted."""

    id: int
    reason: str


def plan_rotation(
    authorities: Sequence[AuthorityView], unaware: Sequence[str], now: datetime
) -> tuple[Promote | Drop, ...]:
    """Returns the due steps. `unaware`: certificate holders that have not confirmed all authorities of the bundle. A
    dropped authority ends no connection, because no valid certificate is left."""
    steps: list[Promote | Drop] = []
    for authority in authorities:
        if authority.state is AuthorityState.NEXT and not unaware:
            steps.append(Promote(authority.id, "all certificate holders trust it"))
        is_over = authority.in_use_until is None or authority.in_use_until <= now
        if authority.state is AuthorityState.PREVIOUS and is_over:
            steps.append(Drop(authority.id, "the last certificate that it signed has expired"))
    return tuple(steps)
