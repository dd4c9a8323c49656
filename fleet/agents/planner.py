"""Reads the proof of a machine of EC2 that it is that machine: a signed question to STS who has the keys that signed it
(`templates/aws/attest.py`), which the control plane asks in its place. Pure; nothing here asks.

Method, path, body and the type of the body are ours and in no proof, so nobody has us ask anything else. Whose keys
they are says STS alone; here stands what must hold before it is asked, and what its answer must be.

When the fleet's authorities change places. Pure.

A new one is `next`: it is in every bundle and signs nothing. Once all who hold a certificate believe it, it is
`current` and signs. The one before is `previous`, and is believed until the last certificate that it signed has ended.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from kernel.decoding import decode_json

VALID_FOR = timedelta(minutes=15)
"""STS takes no signature that is older, or from further ahead."""
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
    r"(?P<instance>i-[0-9a-f]{17})"
)


class BadProof(Exception):
    """It is no proof at all; the text says what is wrong with it."""


class ProofRefused(Exception):
    """It proves nothing to us; the text says why."""


@dataclass(frozen=True, slots=True)
class Proof:
    """A signed question. `nonce_digest`: SHA-256 of what only that machine knows. `unit` and `address` are what the
    machine says, and prove nothing."""

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
    """Whose keys they are: a machine's, by the role of its instance profile."""

    account: str
    role: str
    instance: str


def read_proof(body: bytes) -> Proof:
    """What a machine sent.

    Raises:
        BadProof: too long, no JSON of exactly these members, or a value that none of AWS's can be.
    """
    if len(body) > BODY_BYTES:
        raise BadProof(f"the proof has {len(body)} bytes; it may have {BODY_BYTES}")
    try:
        given = decode_json(body)
    except ValueError as error:
        raise BadProof(f"the proof is no JSON: {error}") from None
    given = _members(given, ("address", "headers", "unit"), "the proof")
    headers = _members(given["headers"], tuple(sorted(_FORMS)), "headers")
    found = {name: _matched(form, headers[name], name) for name, form in _FORMS.items()}
    _matched(_UNIT, given["unit"], "unit")
    _matched(_ADDRESS, given["address"], "address")
    authorization, server = found["authorization"], found["x-switchyard-server"]
    if authorization["signed"] != SIGNED_HEADERS:
        raise BadProof(f"the signature covers the headers {authorization['signed']}; it must cover {SIGNED_HEADERS}")
    try:
        signed_at = datetime.strptime(headers["x-amz-date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        raise BadProof(f"x-amz-date {headers['x-amz-date']} is no date") from None
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


def _members(value: Any, names: tuple[str, ...], what: str) -> dict[str, Any]:
    if not isinstance(value, dict) or tuple(sorted(value)) != names:
        raise BadProof(f"{what} must have the members {', '.join(names)} and no others")
    return value


def _matched(form: re.Pattern[str], value: object, name: str) -> re.Match[str]:
    match = form.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise BadProof(f"{name} has not the form {form.pattern}")
    return match


def check_proof(proof: Proof, *, servers: frozenset[str], sts_host: str, now: datetime) -> None:
    """That it is for us, of now, and a question to the STS of its region. `servers`: our names, in lower case, as
    machines are told them (`host` or `host:port`).

    Raises:
        ProofRefused: it is not.
    """
    if proof.server not in servers:
        names = ", ".join(sorted(servers))
        raise ProofRefused(f"the proof was signed for the server {proof.server}, and this one is {names}")
    if abs(now - proof.signed_at) > VALID_FOR:
        raise ProofRefused(
            f"the proof was signed at {proof.signed_at:%Y-%m-%d %H:%M:%S} UTC; that must be within "
            f"{VALID_FOR.total_seconds() / 60:.0f} minutes of now, {now:%H:%M:%S} UTC"
        )
    if proof.host != sts_host:
        raise ProofRefused(f"the proof is a question to {proof.host[:80]}, and not to {sts_host}")


def read_caller(arn: str) -> Caller:
    """Of the ARN that STS answers. The session of an instance profile is named after its instance, and by AWS alone.

    Raises:
        ProofRefused: it is of a user, or of another kind of session.
    """
    match = _ARN.fullmatch(arn)
    if match is None:
        raise ProofRefused(f"the keys that signed are those of {arn[:120]}, which is no machine")
    return Caller(match["account"], match["role"], match["instance"])


class AuthorityState(StrEnum):
    NEXT = "next"
    CURRENT = "current"
    PREVIOUS = "previous"


@dataclass(frozen=True, slots=True)
class AuthorityView:
    """`in_use_until`: when the last certificate ends that it signed and that is not revoked; None: there is none."""

    id: int
    state: AuthorityState
    in_use_until: datetime | None


@dataclass(frozen=True, slots=True)
class Promote:
    """The next authority signs from now on."""

    id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Drop:
    """This authority is believed no longer."""

    id: int
    reason: str


def plan_rotation(
    authorities: Sequence[AuthorityView], unaware: Sequence[str], now: datetime
) -> tuple[Promote | Drop, ...]:
    """`unaware`: who holds a certificate and did not yet say that it believes all authorities that are in the bundle.

    One that is dropped ends no connection: nobody holds a certificate of it.
    """
    steps: list[Promote | Drop] = []
    for authority in authorities:
        if authority.state is AuthorityState.NEXT and not unaware:
            steps.append(Promote(authority.id, "all who hold a certificate believe it"))
        is_over = authority.in_use_until is None or authority.in_use_until <= now
        if authority.state is AuthorityState.PREVIOUS and is_over:
            steps.append(Drop(authority.id, "the last certificate that it signed has ended"))
    return tuple(steps)
