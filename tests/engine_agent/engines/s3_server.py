"""An S3 server in this process, and artifacts in it."""

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from moto.server import ThreadedMotoServer

from engine_agent.engines.artifacts import describe_folder, write_manifest
from engine_agent.protocol.manifest import MANIFEST_NAME
from engine_agent.protocol.messages import Artifact
from tests.ports import free_port

BUCKET = "models"


@contextmanager
def s3_server() -> Iterator[str]:
    """Yields the URL of an S3 server that stops with the block."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=free_port(), verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@contextmanager
def cutting(url: str, after_bytes: int) -> Iterator[str]:
    """Yields the URL of a relay to the S3 at `url` that cuts each connection after so many bytes of answers."""
    target = urlsplit(url)

    class Way(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection((target.hostname, target.port)) as behind:
                asking = threading.Thread(target=_pass_on, args=(self.request, behind, 1 << 40), daemon=True)
                asking.start()
                _pass_on(behind, self.request, after_bytes)

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Way)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def _pass_on(one: socket.socket, other: socket.socket, left: int) -> None:
    with suppress(OSError):
        while left > 0 and (chunk := one.recv(min(left, 65536))):
            other.sendall(chunk)
            left -= len(chunk)
        for end in (one, other):
            end.shutdown(socket.SHUT_RDWR)


def empty_bucket(url: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a client of an empty bucket at `url`; boto3's environment points there as well."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    for item in client.list_objects_v2(Bucket=BUCKET).get("Contents", []):
        client.delete_object(Bucket=BUCKET, Key=item["Key"])
    return client


def upload(client: Any, folder: Path, files: dict[str, bytes], prefix: str = "llama/3") -> Artifact:
    """Writes these files to `folder`, and uploads them with their manifest to S3."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    manifest = describe_folder(folder, {"made": "here"})
    write_manifest(folder, manifest)
    for name in (*files, MANIFEST_NAME):
        client.put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=(folder / name).read_bytes())
    return Artifact(f"s3://{BUCKET}/{prefix}", manifest.digest)
