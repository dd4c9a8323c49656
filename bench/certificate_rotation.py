"""Rotates the certificate that ingresses show to applications, under streams and new connections, and says what became
of these, how soon new connections saw each certificate, and whether a process of HAProxy changed.

    make up ENGINE=sim DETACH=1
    .venv/bin/python -m bench.certificate_rotation --rounds 10 --rate 10

Streams come at `--rate` a second to each region, and 20 new connections a second besides that send nothing. It sets the
certificate `bench` and removes it again.
"""

import argparse
import os
import socket
import ssl
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import psutil
from cryptography import x509

from bench.live_fleet import Fleet, load, wait_for
from engine_agent.protocol.ports import tls_port
from tests.server_certificates import PublicAuthority, Signed

DEPLOYMENT, NAME = "sim-70b", "bench"
PROBE_EVERY_S, PAUSE_S, SEEN_LIMIT_S = 0.05, 2.0, 120.0
MAX_TOKENS = 48


class Prober(threading.Thread):
    """Opens a connection every `PROBE_EVERY_S`, and notes the serial number of the certificate that it is shown."""

    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        super().__init__(daemon=True)
        self._port, self._context = port, context
        self.seen: dict[int, float] = {}
        self.tried = self.failed = 0
        self.stopping = threading.Event()

    def run(self) -> None:
        while not self.stopping.wait(PROBE_EVERY_S):
            self.tried += 1
            try:
                self.seen.setdefault(self._shown(), time.monotonic())
            except OSError:
                self.failed += 1

    def _shown(self) -> int:
        with (
            socket.create_connection(("127.0.0.1", self._port), timeout=30) as plain,
            self._context.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            der = connection.getpeercert(binary_form=True)
            return x509.load_der_x509_certificate(der or b"").serial_number


def put(fleet: Fleet, authority: PublicAuthority, server: Signed) -> None:
    fleet.post("certificates", name=NAME, certificate=authority.chain(server), private_key=server.key_pem)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def haproxies(fleet: Fleet) -> set[int]:
    """The pids of every ingress's master and workers."""
    masters = [psutil.Process(row["haproxy_pid"]) for row in fleet.rows("ingresses")]
    return {process.pid for master in masters for process in (master, *master.children())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rate", type=float, default=10.0, help="streams a second to each region")
    options = parser.parse_args()
    fleet, authority = Fleet(), PublicAuthority()
    context = ssl.create_default_context(cadata=authority.root.pem)
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(authority.root.pem)
        file.flush()
        os.environ["SSL_CERT_FILE"] = file.name  # httpx believes these
        ports = [tls_port(urlsplit(url).port or 0) for url in fleet.ingresses(DEPLOYMENT)]
        put(fleet, authority, authority.server("localhost"))
        for port in ports:
            wait_for(partial(listens, port), SEEN_LIMIT_S, f"port {port} opens")
        try:
            return measure(fleet, authority, [Prober(port, context) for port in ports], options)
        finally:
            fleet.post(f"certificates/{NAME}/remove")


def measure(fleet: Fleet, authority: PublicAuthority, probers: list[Prober], options: argparse.Namespace) -> int:
    took: list[float] = []
    for prober in probers:
        prober.start()
    urls = [f"https://localhost:{prober._port}" for prober in probers]
    with load(urls, DEPLOYMENT, options.rate, MAX_TOKENS) as answers:
        before = haproxies(fleet)
        for _ in range(options.rounds):
            server = authority.server("localhost")
            serial, began = server.certificate.serial_number, time.monotonic()
            put(fleet, authority, server)
            for prober in probers:
                wait_for(partial(prober.seen.get, serial), SEEN_LIMIT_S, "the new certificate is seen")
                took.append(prober.seen[serial] - began)
            time.sleep(PAUSE_S)
        after = haproxies(fleet)
    for prober in probers:
        prober.stopping.set()
        prober.join()
    errors = [answer.error for answer in answers if answer.error]
    across = sum(1 for answer in answers if answer.ended)
    sys.stdout.write(
        f"rotations {options.rounds} | streams {across}, failed or broken {len(errors)} |"
        f" new connections {sum(prober.tried for prober in probers)},"
        f" failed {sum(prober.failed for prober in probers)} |"
        f" seen after s: median {median(took):.2f}, most {max(took):.2f} |"
        f" processes of HAProxy {'unchanged' if before == after else f'changed: {before ^ after}'}\n"
    )
    for error in errors[:5]:
        sys.stdout.write(f"  {error}\n")
    return int(bool(errors) or before != after)


if __name__ == "__main__":
    sys.exit(main())
