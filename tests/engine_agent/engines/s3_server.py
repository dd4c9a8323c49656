"""An S3 of our own in this process, and artifacts in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from engine_agent.engines.artifact import describe_folder, write_manifest
from engine_agent.protocol.manifest import MANIFEST_NAME
from engine_agent.protocol.messages import Artifact
from tests.engine_agent.runtime.agents import free_ports

BUCKET = "models"


@contextmanager
def s3_server() -> Iterator[str]:
    """URL of an S3 that ends with the block."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=free_ports(1), verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def empty_bucket(url: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of an empty bucket at `url`; what boto3 finds in the environment leads there too."""
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
    """Write these files to `folder`, and them and their manifest to S3."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    manifest = describe_folder(folder, {"made": "here"})
    write_manifest(folder, manifest)
    for name in (*files, MANIFEST_NAME):
        client.put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=(folder / name).read_bytes())
    return Artifact(f"s3://{BUCKET}/{prefix}", manifest.digest)
