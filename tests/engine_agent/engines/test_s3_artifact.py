"""Artifacts come from S3 whole, go on where they stopped, and are refused for what they are not."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest

from engine_agent.engines.artifact import verify_folder, write_manifest
from engine_agent.engines.s3_artifact import CannotFetch, cached_folder, fetch_artifact
from engine_agent.protocol.manifest import MANIFEST_NAME, Manifest
from engine_agent.protocol.messages import Artifact
from tests.engine_agent.engines.s3_server import BUCKET, empty_bucket, s3_server, upload

FILES = {"model.safetensors": b"weights " * 1000, "tokenizer/vocab.json": b"{}"}


@dataclass
class Store:
    """S3 with one artifact in it, and a cache without."""

    client: Any
    artifact: Artifact
    cache: Path
    said: list[str]

    def fetch(self) -> Path:
        return fetch_artifact(self.artifact, self.cache, self.said.append)

    @property
    def unfinished(self) -> Path:
        folder = cached_folder(self.artifact, self.cache)
        return folder.with_name(folder.name + ".partial")

    def begin(self, name: str, content: bytes) -> None:
        """Leave the beginning of a download behind."""
        file = self.unfinished / f"{name}.part"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def store(s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    client = empty_bucket(s3_url, monkeypatch)
    return Store(client, upload(client, tmp_path / "source", FILES), tmp_path / "cache", [])


def requested_ranges(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The ranges of the requests for the weights from now on."""
    seen: list[str | None] = []

    def note(params: dict[str, Any], **_: Any) -> None:
        if params["url_path"].endswith("model.safetensors"):
            seen.append(params["headers"].get("Range"))

    make = boto3.client

    def client(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        made.meta.events.register("before-call.s3.GetObject", note)
        return made

    monkeypatch.setattr(boto3, "client", client)
    return seen


def test_an_artifact_comes_whole_and_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = store.fetch()
    assert folder.name == f"3-{store.artifact.digest.removeprefix('sha256:')[:12]}"
    assert verify_folder(folder, store.artifact.digest).files.keys() == FILES.keys()
    assert not store.unfinished.exists()
    ranges = requested_ranges(store, monkeypatch)
    assert store.fetch() == folder
    assert ranges == []


def test_a_broken_download_goes_on_where_it_stopped(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.begin("model.safetensors", FILES["model.safetensors"][:5000])
    ranges = requested_ranges(store, monkeypatch)
    verify_folder(store.fetch(), store.artifact.digest)
    assert ranges == ["bytes=5000-"]


def test_a_beginning_of_something_else_is_thrown_away(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.begin("model.safetensors", b"x" * 9)
    ranges = requested_ranges(store, monkeypatch)
    verify_folder(store.fetch(), store.artifact.digest)
    assert ranges == ["bytes=9-", None]


@pytest.mark.parametrize("length", [8000, 9000])
def test_a_beginning_that_is_complete_or_too_long_is_told_apart(store: Store, length: int) -> None:
    store.begin("model.safetensors", (FILES["model.safetensors"] + b"y" * 1000)[:length])
    verify_folder(store.fetch(), store.artifact.digest)


def test_files_that_came_already_are_not_asked_for_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.unfinished.mkdir(parents=True)
    (store.unfinished / "model.safetensors").write_bytes(FILES["model.safetensors"])
    ranges = requested_ranges(store, monkeypatch)
    store.fetch()
    assert ranges == []


def test_a_changed_object_is_never_kept(store: Store) -> None:
    store.client.put_object(Bucket=BUCKET, Key="llama/3/model.safetensors", Body=b"other weights")
    with pytest.raises(CannotFetch, match=r"s3://models/llama/3/model.safetensors has sha256 .* upload the artifact"):
        store.fetch()
    assert not cached_folder(store.artifact, store.cache).exists()
    assert not list(store.unfinished.glob("model*"))


def test_another_artifact_at_that_place_is_refused(store: Store) -> None:
    store.artifact = Artifact(store.artifact.uri, "sha256:" + "0" * 64)
    with pytest.raises(CannotFetch, match=r"holds sha256:.*, but sha256:0{64} was asked for"):
        store.fetch()


def test_a_file_that_the_manifest_lists_and_the_bucket_lacks_is_named(store: Store) -> None:
    store.client.delete_object(Bucket=BUCKET, Key="llama/3/tokenizer/vocab.json")
    with pytest.raises(CannotFetch, match=r"llama/3/tokenizer/vocab.json is missing, one of 1 files"):
        store.fetch()


def test_a_manifest_that_is_none_is_refused(store: Store) -> None:
    store.client.put_object(Bucket=BUCKET, Key=f"llama/3/{MANIFEST_NAME}", Body=b"{}")
    with pytest.raises(CannotFetch, match=r"llama/3/manifest.json is no manifest"):
        store.fetch()


def test_no_file_may_lie_outside_of_the_artifact(store: Store, tmp_path: Path) -> None:
    manifest = Manifest({"../escaped": "0" * 64}, {})
    write_manifest(tmp_path, manifest)
    text = (tmp_path / MANIFEST_NAME).read_bytes()
    store.client.put_object(Bucket=BUCKET, Key=f"llama/3/{MANIFEST_NAME}", Body=text)
    store.artifact = Artifact(store.artifact.uri, manifest.digest)
    with pytest.raises(CannotFetch, match=r"lists '../escaped', which lies outside of the artifact"):
        store.fetch()


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("s3://models/llama/4", r"s3://models/llama/4 has no manifest.json: write it with"),
        ("s3://nowhere/llama", r"the bucket of s3://nowhere/llama does not exist"),
        ("file:///models", r"file:///models is no place in S3; it must be s3://bucket/prefix"),
    ],
)
def test_a_place_without_the_artifact_says_so(store: Store, uri: str, said: str) -> None:
    store.artifact = Artifact(uri, store.artifact.digest)
    with pytest.raises(CannotFetch, match=said):
        store.fetch()


def test_a_disk_that_is_too_small_is_noticed_before(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1_000_000})())
    with pytest.raises(CannotFetch, match=r"has 0.0 GB free and the artifact needs 1.1 GB more"):
        store.fetch()


def test_a_silent_network_is_an_error_with_a_reason(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setattr("engine_agent.engines.s3_artifact.ATTEMPTS", 1)
    with pytest.raises(CannotFetch, match=r"s3://models/llama/3 did not arrive: .*kept for next time"):
        store.fetch()
