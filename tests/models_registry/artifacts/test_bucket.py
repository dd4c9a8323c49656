"""Artifacts in S3 are read only from the named bucket, and never from where it redirects."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from engine_agent.protocol.manifest import MANIFEST_NAME, BadArtifact
from engine_agent.protocol.messages import Artifact
from models_registry.artifacts.planner import ArtifactLimits, parse_place
from models_registry.artifacts.services import sources as artifact_bucket
from models_registry.artifacts.services.sources import OpenArtifact, SourceTrouble, artifact_open, file_sha256, one_host
from tests.engine_agent.engines.s3_server import BUCKET, empty_bucket, s3_server, upload
from tests.models_registry.rows import FILES
from tests.ports import free_port

pytestmark = pytest.mark.slow

LIMITS = ArtifactLimits()


@dataclass
class Store:
    """S3 with one artifact."""

    client: Any
    artifact: Artifact

    def open(self, uri: str = "", limits: ArtifactLimits = LIMITS, sources: str = f"s3://{BUCKET}") -> OpenArtifact:
        wanted = Artifact(uri or self.artifact.uri, "" if uri else self.artifact.digest)
        return artifact_open(wanted, (parse_place(sources),), limits)


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def store(s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    client = empty_bucket(s3_url, monkeypatch)
    return Store(client, upload(client, tmp_path, FILES))


def test_an_artifact_is_listed_and_read(store: Store) -> None:
    store.client.put_object(Bucket=BUCKET, Key="llama/3/", Body=b"")  # as consoles create folders
    store.client.put_object(Bucket=BUCKET, Key="llama/33/other", Body=b"another artifact's")
    found = store.open()
    assert found.sizes == {"model.safetensors": 8000, "tokenizer/vocab.json": 2}
    assert {path: file_sha256(found, path, lambda _: None) for path in found.sizes} == found.manifest.files


def test_a_bucket_may_be_an_artifact_by_itself(store: Store, tmp_path: Path) -> None:
    for name in (*FILES, MANIFEST_NAME):
        store.client.upload_file(str(tmp_path / name), BUCKET, name)
    for name in (*FILES, MANIFEST_NAME):
        store.client.delete_object(Bucket=BUCKET, Key=f"llama/3/{name}")
    assert store.open(f"s3://{BUCKET}").manifest.files.keys() == FILES.keys()


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("s3://models/llama/4", "s3://models/llama/4/manifest.json does not exist: upload the artifact with"),
        ("s3://nowhere/llama", "bucket nowhere does not exist"),
    ],
)
def test_what_is_not_there_is_said(store: Store, uri: str, message: str) -> None:
    with pytest.raises(BadArtifact, match=message):
        store.open(uri, sources=uri)


def test_a_bucket_that_is_not_on_the_list_is_not_asked(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boto3, "client", lambda *_, **__: pytest.fail("it was asked"))
    with pytest.raises(BadArtifact, match="s3://models/llama/3 is outside the allowed sources"):
        store.open(sources="s3://others")


def test_a_file_that_the_bucket_lacks_is_named(store: Store) -> None:
    store.client.delete_object(Bucket=BUCKET, Key="llama/3/tokenizer/vocab.json")
    with pytest.raises(BadArtifact, match=r"llama/3/tokenizer/vocab.json is missing; 1 files of"):
        store.open()


def test_a_file_that_vanishes_is_named(store: Store) -> None:
    found = store.open()
    store.client.delete_object(Bucket=BUCKET, Key="llama/3/model.safetensors")
    with pytest.raises(BadArtifact, match=r"llama/3/model.safetensors does not exist"):
        file_sha256(found, "model.safetensors", lambda _: None)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (replace(LIMITS, manifest_bytes=10), "has [0-9]+ bytes; the limit is 10"),
        (replace(LIMITS, files=1), "lists 2 files; at most 1 may be"),
    ],
)
def test_limits_are_kept(store: Store, limits: ArtifactLimits, message: str) -> None:
    with pytest.raises(BadArtifact, match=message):
        store.open(limits=limits)


def test_a_bucket_of_more_files_than_any_artifact_is_not_listed_to_its_end(store: Store) -> None:
    for number in range(3):
        store.client.put_object(Bucket=BUCKET, Key=f"llama/3/stray-{number}", Body=b"")
    with pytest.raises(BadArtifact, match="has more than 2 files"):
        store.open(limits=replace(LIMITS, files=2))


def test_a_silent_network_may_pass(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setattr(artifact_bucket, "ATTEMPTS", 1)
    with pytest.raises(SourceTrouble, match=r"s3://models/llama/3/manifest.json: Could not connect"):
        store.open()


def test_without_credentials_the_way_out_is_said(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    with pytest.raises(BadArtifact, match="the control plane has no AWS credentials"):
        store.open()


def test_requests_go_to_one_host_alone() -> None:
    check = one_host()
    for path in ("a", "b"):
        check(SimpleNamespace(url=f"https://models.s3.amazonaws.com/{path}"))
    with pytest.raises(
        BadArtifact, match=r"redirect from models.s3.amazonaws.com to models.s3.eu-west-1.amazonaws.com"
    ):
        check(SimpleNamespace(url="https://models.s3.eu-west-1.amazonaws.com/a"))


def test_a_redirect_is_not_followed(store: Store, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with redirecting_server(s3_url) as (url, requested):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        with pytest.raises(BadArtifact, match="is in another region, and redirects are not followed"):
            store.open()
    assert requested == ["/models/llama/3/manifest.json"]


@contextmanager
def redirecting_server(target: str) -> Iterator[tuple[str, list[str]]]:
    """A server that redirects every request to the same path at `target`; returns its URL and its requests."""
    requested: list[str] = []

    class Redirecting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requested.append(self.path)
            self.send_response(307)
            self.send_header("Location", target + self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", free_port()), Redirecting) as server:
        thread = Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", requested
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("code", "status", "headers", "kind", "message"),
    [
        ("AccessDenied", 403, {}, BadArtifact, "may not read s3://models/a: it needs s3:GetObject"),
        ("PermanentRedirect", 301, {"x-amz-bucket-region": "eu-west-1"}, BadArtifact, "bucket models is in eu-west-1"),
        ("TemporaryRedirect", 307, {}, BadArtifact, "is in another region, and redirects are not followed"),
        ("SlowDown", 503, {}, SourceTrouble, "s3://models/a: S3 answered SlowDown"),
    ],
)
def test_what_s3_answers_is_explained(
    code: str, status: int, headers: dict[str, str], kind: type[Exception], message: str
) -> None:
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers}}
    explained = artifact_bucket._explain(ClientError(answer, "GetObject"), "s3://models/a", "models")
    assert isinstance(explained, kind)
    assert message in str(explained)
