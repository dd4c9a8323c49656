"""What a host that joins asks the control plane before it has a credential, over the key that its line pins."""

import base64
import hashlib
import hmac
import http.client
import json
import ssl
from typing import Any
from urllib.parse import urlsplit

from engine_agent.protocol.strict_json import strict_loads

TIMEOUT_S = 20.0
MAX_RESPONSE_BYTES = 64 * 1024


class ControlRefused(Exception):
    """The control plane did not do as asked; the text says why."""


class JoinClient:
    """Calls by one token. `pin` is as curl takes it (`sha256//…;sha256//…`); "" for plain links."""

    def __init__(self, server: str, pin: str, token: str) -> None:
        self._server, self._pin, self.token = urlsplit(server), pin, token

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send JSON, and return the JSON that comes back.

        Raises:
            ControlRefused: no answer in `TIMEOUT_S`, another key than the pinned one, or not a 2xx.
        """
        connection = self._connection()
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        try:
            connection.connect()
            self._check_pin(connection)
            connection.request("POST", path, json.dumps(body), headers)
            answer = connection.getresponse()
            content = answer.read(MAX_RESPONSE_BYTES)
            found = strict_loads(content) if content else {}
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ControlRefused(f"{self._server.geturl()} does not answer: {error}") from None
        finally:
            connection.close()
        if answer.status >= 300:
            raise ControlRefused(str(found.get("error", answer.reason)))
        return dict(found)

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._server.hostname or "", self._server.port
        if self._server.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the pinned key is checked in their place
        return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)

    def _check_pin(self, connection: http.client.HTTPConnection) -> None:
        if self._server.scheme == "http":
            return
        sock = connection.sock
        shown = sock.getpeercert(binary_form=True) if isinstance(sock, ssl.SSLSocket) else None
        if not shown or not any(hmac.compare_digest(pin_of(shown), pin) for pin in self._pin.split(";")):
            raise ControlRefused(f"{self._server.geturl()} shows another key than the one that the line pins")


def pin_of(certificate: bytes) -> str:
    """The key of a certificate (DER) as curl's --pinnedpubkey takes it."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = x509.load_der_x509_certificate(certificate).public_key()
    digest = hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()
    return f"sha256//{base64.b64encode(digest).decode()}"
