"""Security keys and passkeys as second factors (WebAuthn), by Yubico's library. It stores nothing.

A key signs the page's origin and host, which must be those of the request, so signatures for other pages are rejected.
The library is imported on first use, because only web needs it."""

import base64
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from django.http import HttpRequest

from kernel.decoding import decode_json

if TYPE_CHECKING:
    from fido2.server import Fido2Server
    from fido2.webauthn import AttestedCredentialData

LONGEST_RESPONSE = 16 * 1024
"""Of a browser, as JSON; those of common keys have one to four kilobytes."""
CREATE, GET = "create", "get"
"""The two ceremonies, as browsers call them: to enrol a key, and to show it."""
_FAULTS = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError, OverflowError, RecursionError,
    struct.error, InvalidSignature, UnsupportedAlgorithm,
)  # fmt: skip
"""Errors of the library for bytes that are not a valid response of a key."""


class KeyFault(Exception):
    """The response is rejected; the text has the reason."""


@dataclass(frozen=True, slots=True)
class Site:
    """The page of the request: `origin` as the browser names it, `host` without port."""

    origin: str
    host: str

    @property
    def has_keys(self) -> bool:
        """Whether browsers support security keys here: on pages with a host name, over HTTPS or on this machine."""
        try:
            ip_address(self.host.strip("[]"))
        except ValueError:
            return self.origin.startswith("https://") or self.host == "localhost"
        return False


@dataclass(frozen=True, slots=True)
class Ceremony:
    """`options`: for the browser, as JSON. `challenge`: its response must sign it."""

    options: str
    challenge: str


def site_of(request: HttpRequest) -> Site:
    """Returns the site of a request, whose host is an allowed one."""
    host = request.get_host()
    name, _, port = host.rpartition(":")
    return Site(f"{request.scheme}://{host}", name if name and port.isdigit() else host)


def enrolment(site: Site, user_id: int, username: str, known: Sequence[str]) -> Ceremony:
    """Returns the options for a new credential, on a key that has none of `known`."""
    from fido2.webauthn import PublicKeyCredentialUserEntity, ResidentKeyRequirement, UserVerificationRequirement

    user = PublicKeyCredentialUserEntity(id=str(user_id).encode(), name=username, display_name=username)
    options, state = _server(site).register_begin(
        user,
        [_credential(each) for each in known],
        resident_key_requirement=ResidentKeyRequirement.DISCOURAGED,
        user_verification=UserVerificationRequirement.DISCOURAGED,
    )
    return Ceremony(json.dumps(dict(options.public_key)), state["challenge"])


def showing(site: Site, known: Sequence[str]) -> Ceremony:
    """Returns the options for a signature by one of `known`."""
    from fido2.webauthn import UserVerificationRequirement

    credentials = [_credential(each) for each in known]
    options, state = _server(site).authenticate_begin(credentials, UserVerificationRequirement.DISCOURAGED)
    return Ceremony(json.dumps(dict(options.public_key)), state["challenge"])


def challenge_in(response: Mapping[str, Any]) -> str:
    """Returns the challenge that a response claims to sign, unverified. Raises KeyFault if it is not a response of a
    browser."""
    try:
        encoded = str(response["response"]["clientDataJSON"])
        client_data = decode_json(base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)))
        return str(client_data["challenge"])
    except _FAULTS as fault:
        raise KeyFault("this is no response of a security key") from fault


def read_response(text: str) -> Mapping[str, Any]:
    """A browser's response. Raises KeyFault if it is too long, or no JSON object."""
    try:
        response = decode_json(text) if len(text) <= LONGEST_RESPONSE else None
    except ValueError:
        response = None
    if not isinstance(response, dict):
        raise KeyFault("this is no response of a security key")
    return response


def enrolled(site: Site, challenge: str, response: Mapping[str, Any]) -> tuple[str, int]:
    """Returns the new credential in its stored form, and its key's counter. Raises KeyFault if it was made for another
    page or challenge, or without a touch of a key."""
    from fido2.utils import websafe_encode

    try:
        data = _server(site).register_complete(_state(challenge), response)
        assert data.credential_data is not None  # noqa: S101 - else the next line would say less
        _require_usable(data.credential_data)
        return websafe_encode(bytes(data.credential_data)), data.counter
    except _FAULTS as fault:
        raise KeyFault(str(fault) or type(fault).__name__) from fault


def shown(site: Site, challenge: str, known: Sequence[str], response: Mapping[str, Any]) -> tuple[str, int]:
    """Returns which of `known` signed, and its key's counter. Raises KeyFault if none did, or for another page or
    challenge."""
    from fido2.webauthn import AuthenticationResponse

    try:
        by_id = {_credential(each).credential_id: each for each in known}
        credentials = [_credential(each) for each in known]
        used = _server(site).authenticate_complete(_state(challenge), credentials, response)
        counter = AuthenticationResponse.from_dict(response).response.authenticator_data.counter
        return by_id[used.credential_id], counter
    except _FAULTS as fault:
        raise KeyFault(str(fault) or type(fault).__name__) from fault


def _require_usable(credential: "AttestedCredentialData") -> None:
    """Whether the public key is valid: it rejects a wrong signature without another error."""
    try:
        credential.public_key.verify(b"", b"")
    except InvalidSignature:
        return
    except NotImplementedError:
        pass
    raise ValueError("its public key is of no use")


def _server(site: Site) -> "Fido2Server":
    from fido2.server import Fido2Server
    from fido2.webauthn import PublicKeyCredentialRpEntity

    party = PublicKeyCredentialRpEntity(id=site.host, name="Switchyard")
    return Fido2Server(party, verify_origin=lambda origin: origin == site.origin)


def _state(challenge: str) -> dict[str, Any]:
    from fido2.webauthn import UserVerificationRequirement

    return {"challenge": challenge, "user_verification": UserVerificationRequirement.DISCOURAGED}


def _credential(text: str) -> "AttestedCredentialData":
    from fido2.webauthn import AttestedCredentialData

    return AttestedCredentialData(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
