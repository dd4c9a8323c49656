"""The PostgreSQL that a laboratory's control hosts share: `python -m lab.hosts.database ADDRESS` on its own host.

It runs the servers of `controlplane.embedded`, which listen on Unix sockets, behind an HAProxy that speaks TLS: the
PostgreSQL of the wheel is built without OpenSSL. PostgreSQL trusts the account of that HAProxy, so any control host is
the database's owner. That is enough for a laboratory and for nothing else."""

import asyncio
import json
import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import unquote, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from engine_agent.ingress.haproxy import find_binary
from lab.hosts.topology import CONTROL_SITE, DATABASE_PORT, Topology

VALID = timedelta(days=365)
_CONFIGURATION = """\
defaults
    mode tcp
    timeout connect 2s
    timeout client 2d
    timeout server 2d

frontend control_hosts
    bind {address}:{port} ssl crt {certificate} alpn postgresql ssl-min-ver TLSv1.3
    tcp-request connection reject unless {{ src {network} }}
    default_backend postgresql

backend postgresql
    server postgresql unix@{socket}
"""


def configuration(address: str, certificate: Path, sockets: str) -> str:
    network = Topology().networks[CONTROL_SITE]
    socket = f"{sockets}/.s.PGSQL.5432"
    return _CONFIGURATION.format(
        address=address, port=DATABASE_PORT, certificate=certificate, network=network, socket=socket
    )


def certificate(address: str) -> str:
    """A certificate for that address that only its key vouches for, and the key, as PEM."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, address)])
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + VALID)
        .sign(key, hashes.SHA256())
    )
    kind = serialization.PrivateFormat.PKCS8
    return (
        signed.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption())
    ).decode()


async def run(address: str, home: Path) -> int:
    servers = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "controlplane.embedded", "servers", stdout=asyncio.subprocess.PIPE
    )
    assert servers.stdout is not None  # noqa: S101 - for the type checker
    urls = json.loads(await servers.stdout.readline())
    pem, written = home / "database.pem", home / "haproxy.cfg"
    pem.touch(mode=0o600)
    pem.write_text(certificate(address))
    written.write_text(configuration(address, pem, unquote(urlsplit(urls["database_url"]).hostname or "")))
    proxy = await asyncio.create_subprocess_exec(str(find_binary()), "-db", "-f", str(written))
    await asyncio.wait(
        [asyncio.create_task(each.wait()) for each in (servers, proxy)], return_when=asyncio.FIRST_COMPLETED
    )
    return 1


if __name__ == "__main__":
    sys.exit(asyncio.run(run(sys.argv[1], Path(os.environ["SWITCHYARD_HOME"]))))
