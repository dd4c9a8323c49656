"""A security key in software: it makes credentials and signs as browsers and keys do, with real signatures."""

import hashlib
import json
import secrets
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from fido2.cose import ES256
from fido2.utils import websafe_encode
from fido2.webauthn import AttestationObject, AttestedCredentialData, AuthenticatorData, CollectedClientData

TOUCHED = AuthenticatorData.FLAG.UP


@dataclass
class SoftwareKey:
    """`origin`: of the page, as the browser states it. `counter`: of signatures; stays 0 where a key has none."""

    origin: str = "http://localhost"
    counter: int = 0
    step: int = 1
    flags: AuthenticatorData.FLAG = TOUCHED
    private: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))
    credential_id: bytes = field(default_factory=lambda: secrets.token_bytes(32))

    def create(self, options: str) -> str:
        """The browser's response to a page's options to enrol."""
        asked = json.loads(options)
        credential = AttestedCredentialData.create(
            b"\0" * 16,
            self.credential_id,
            ES256.from_cryptography_key(self.private.public_key()),  # type: ignore[no-untyped-call]
        )
        flags = self.flags | AuthenticatorData.FLAG.AT
        data = AuthenticatorData.create(_rp(asked["rp"]["id"]), flags, self.counter, bytes(credential))
        attestation = AttestationObject.create("none", data, {})
        client = self._client_data(CollectedClientData.TYPE.CREATE, asked["challenge"])
        return self._response({"clientDataJSON": client, "attestationObject": bytes(attestation)})

    def get(self, options: str) -> str:
        """The browser's response to a page's options to show it."""
        asked = json.loads(options)
        self.counter += self.step
        data = AuthenticatorData.create(_rp(asked["rpId"]), self.flags, self.counter)
        client = self._client_data(CollectedClientData.TYPE.GET, asked["challenge"])
        signature = self.private.sign(bytes(data) + hashlib.sha256(client).digest(), ec.ECDSA(hashes.SHA256()))
        return self._response({"clientDataJSON": client, "authenticatorData": bytes(data), "signature": signature})

    def _client_data(self, kind: str, challenge: str) -> bytes:
        return bytes(CollectedClientData.create(kind, challenge, self.origin))

    def _response(self, parts: dict[str, bytes]) -> str:
        number = websafe_encode(self.credential_id)
        response: dict[str, Any] = {name: websafe_encode(part) for name, part in parts.items()}
        return json.dumps({"id": number, "rawId": number, "type": "public-key", "response": response})


def _rp(host: str) -> bytes:
    return hashlib.sha256(host.encode()).digest()
