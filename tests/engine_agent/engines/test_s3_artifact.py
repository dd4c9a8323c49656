"""Downloads from S3 are complete, resume where they stopped, and are refused if anything differs."""

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from engine_agent.engines import s3_artifact
from engine_agent.engines.artifacts import (
    CannotFetch,
    Entry,
    acquire,
    entry_of,
    make_room,
    mark_damaged,
    verify_folder,
    write_manifest,
)
from engine_agent.engines.s3_artifact import Arrived, download, fetching_words
from engine_agent.protocol.manifest import MANIFEST_NAME, Manifest
from engine_agent.protocol.messages import Artifact
from tests.engine_agent.engines.s3_server import BUCKET, cutting, empty_bucket, s3_server, upload

pytestmark = pytest.mark.slow

FILES = {"model.safetensors": b"weights " * 1000, "tokenizer/vocab.json": b"{}"}
WEIGHTS = "llama/3/model.safetensors"


@dataclass
class Store:
    """S3 with one artifact, and an empty cache."""

    client: Any
    artifact: Artifact
    cache: Path
    lines: list[str]
    arrived: Arrived

    @property
    def entry(self) -> Entry:
        return entry_of(self.artifact.digest, self.cache)

    def fetch(self) -> Path:
        os.close(acquire(self.entry, self._download, lambda: None))
        return self.entry.folder

    def _download(self) -> None:
        room = partial(make_room, self.entry, limit=None)
        download(self.artifact, self.entry, room, self.arrived, self.lines.append)

    def begin(self, content: bytes, tag: str = "") -> None:
        """Leaves the beginning of a download of the weights behind."""
        parts = self.entry.partial / "parts"
        parts.mkdir(parents=True, exist_ok=True)
        (parts / "0").write_bytes(content)
        (parts / "0.etag").write_text(tag or self.client.head_object(Bucket=BUCKET, Key=WEIGHTS)["ETag"])


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def store(s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    client = empty_bucket(s3_url, monkeypatch)
    return Store(client, upload(client, tmp_path / "source", FILES), tmp_path / "cache", [], Arrived())


def requested_ranges(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Records the ranges of later requests for the weights."""
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
    assert folder.name == store.artifact.digest.removeprefix("sha256:")
    assert verify_folder(folder, store.artifact.digest).files.keys() == FILES.keys()
    assert not store.entry.partial.exists()
    assert store.arrived.words() == "fetching 8 of 8 kB"
    ranges = requested_ranges(store, monkeypatch)
    assert store.fetch() == folder
    assert ranges == []


def test_a_broken_download_goes_on_where_it_stopped(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.begin(FILES["model.safetensors"][:5000])
    ranges = requested_ranges(store, monkeypatch)
    verify_folder(store.fetch(), store.artifact.digest)
    assert ranges == ["bytes=5000-"]


def test_a_connection_that_is_cut_is_gone_on_with_at_once(
    store: Store, s3_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    large = {"model.safetensors": os.urandom(1_500_000)}
    store.artifact = upload(store.client, tmp_path / "large", large)
    monkeypatch.setattr(s3_artifact, "CHUNK_BYTES", 65536)
    monkeypatch.setattr(s3_artifact, "FIRST_PAUSE_S", 0.0)
    with cutting(s3_url, after_bytes=600_000) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        ranges = requested_ranges(store, monkeypatch)
        verify_folder(store.fetch(), store.artifact.digest)
    assert ranges[0] is None
    begun = [int(str(each).removeprefix("bytes=").removesuffix("-")) for each in ranges[1:]]
    assert begun == sorted(set(begun)) != []
    assert "broke off at" in "\n".join(store.lines)


def test_a_beginning_of_something_else_is_thrown_away(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.begin(b"x" * 9)
    ranges = requested_ranges(store, monkeypatch)
    verify_folder(store.fetch(), store.artifact.digest)
    assert ranges == ["bytes=9-", None]


def test_a_beginning_of_an_earlier_object_is_not_even_gone_on_with(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.begin(FILES["model.safetensors"][:5000], tag='"of another upload"')
    ranges = requested_ranges(store, monkeypatch)
    verify_folder(store.fetch(), store.artifact.digest)
    assert ranges == [None]


@pytest.mark.parametrize("length", [8000, 9000])
def test_a_beginning_that_is_complete_or_too_long_is_told_apart(store: Store, length: int) -> None:
    store.begin((FILES["model.safetensors"] + b"y" * 1000)[:length])
    verify_folder(store.fetch(), store.artifact.digest)


def test_files_that_came_already_are_not_asked_for_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    (store.entry.partial / "files").mkdir(parents=True)
    (store.entry.partial / "files" / "model.safetensors").write_bytes(FILES["model.safetensors"])
    ranges = requested_ranges(store, monkeypatch)
    store.fetch()
    assert ranges == []


def test_of_a_damaged_artifact_only_what_is_wrong_comes_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = store.fetch()
    (folder / "tokenizer/vocab.json").write_bytes(b"[]")
    (folder / "not-listed").write_bytes(b"")
    mark_damaged(folder)
    ranges = requested_ranges(store, monkeypatch)
    verify_folder(store.fetch(), store.artifact.digest)
    assert ranges == []


def test_an_object_that_changes_while_it_comes_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(**_: Any) -> None:
        store.client.put_object(Bucket=BUCKET, Key=WEIGHTS, Body=b"another")

    listed = s3_artifact._objects

    def objects(*given: Any) -> Any:
        found = listed(*given)
        change()
        return found

    monkeypatch.setattr(s3_artifact, "_objects", objects)
    with pytest.raises(CannotFetch, match=r"model.safetensors changed during the download: an artifact never changes"):
        store.fetch()
    assert not store.entry.folder.exists()
    assert not (store.entry.partial / "parts" / "0").exists()


def test_a_changed_object_is_never_kept(store: Store) -> None:
    store.client.put_object(Bucket=BUCKET, Key="llama/3/model.safetensors", Body=b"other weights")
    with pytest.raises(CannotFetch, match=r"s3://models/llama/3/model.safetensors has sha256 .* upload the artifact"):
        store.fetch()
    assert not store.entry.folder.exists()
    assert not (store.entry.partial / "files" / "model.safetensors").exists()
    assert not (store.entry.partial / "parts" / "0").exists()


def test_another_artifact_at_that_place_is_refused(store: Store) -> None:
    store.artifact = Artifact(store.artifact.uri, "sha256:" + "0" * 64)
    with pytest.raises(CannotFetch, match=r"holds sha256:.*, but sha256:0{64} was requested"):
        store.fetch()


def test_a_file_that_the_manifest_lists_and_the_bucket_lacks_is_named(store: Store) -> None:
    store.client.delete_object(Bucket=BUCKET, Key="llama/3/tokenizer/vocab.json")
    with pytest.raises(CannotFetch, match=r"llama/3/tokenizer/vocab.json is missing: 1 files of its manifest are"):
        store.fetch()


def test_a_manifest_that_is_none_is_refused(store: Store) -> None:
    store.client.put_object(Bucket=BUCKET, Key=f"llama/3/{MANIFEST_NAME}", Body=b"{}")
    with pytest.raises(CannotFetch, match=r"llama/3/manifest.json is not a manifest"):
        store.fetch()


@pytest.mark.parametrize(
    ("files", "lines"),
    [
        ({"../escaped": "0" * 64}, r"lists '../escaped', which is outside of the artifact"),
        ({"/etc/passwd": "0" * 64}, r"lists '/etc/passwd', which is outside of the artifact"),
        ({"a//b": "0" * 64, "a/b": "0" * 64}, r"lists 'a//b', which is not a plain path"),
        ({"a": "0" * 64, "a/b": "0" * 64}, r"lists 'a' as a file and as the folder of 'a/b'"),
        ({MANIFEST_NAME: "0" * 64}, r"lists 'manifest.json', which is the manifest itself"),
        ({"a": "../../x"}, r"lists 'a' with '../../x'; it must be a SHA-256"),
        ({"n" * 256: "0" * 64}, r"which is too long: 1024 characters, 255 bytes per name"),
        ({"a\nb": "0" * 64}, r"which has unprintable characters"),
        ({str(number): "0" * 64 for number in range(10_001)}, r"lists 10001 files; at most 10000 may be"),
        ({}, r"manifest.json lists no file"),
    ],
)
def test_a_hostile_manifest_is_refused_before_anything_is_written(
    store: Store, tmp_path: Path, files: dict[str, str], lines: str
) -> None:
    manifest = Manifest(files, {})
    write_manifest(tmp_path, manifest)
    text = (tmp_path / MANIFEST_NAME).read_bytes()
    store.client.put_object(Bucket=BUCKET, Key=f"llama/3/{MANIFEST_NAME}", Body=text)
    store.artifact = Artifact(store.artifact.uri, manifest.digest)
    with pytest.raises(CannotFetch, match=lines):
        store.fetch()
    assert [path.name for path in store.cache.iterdir()] == [store.entry.lock.name]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (b" " * (8 * 1024 * 1024 + 1), r"manifest.json has 8388609 bytes; the limit is 8388608"),
        (b'{"files":{"a":"1","a":"2"},"source":{},"digest":""}', r"not a manifest: .*the member 'a' is there twice"),
        (b"[" * 100_000, r"not a manifest: .*nested deeper"),
    ],
)
def test_a_manifest_that_is_huge_or_has_no_one_meaning_is_refused(store: Store, text: bytes, lines: str) -> None:
    store.client.put_object(Bucket=BUCKET, Key=f"llama/3/{MANIFEST_NAME}", Body=text)
    with pytest.raises(CannotFetch, match=lines):
        store.fetch()


@pytest.mark.parametrize(
    ("uri", "lines"),
    [
        ("s3://models/llama/4", r"s3://models/llama/4 has no manifest.json: upload the artifact by manage.py"),
        ("s3://nowhere/llama", r"the bucket of s3://nowhere/llama does not exist"),
        ("file:///models", r"file:///models is not in S3; it must be s3://bucket/prefix"),
    ],
)
def test_a_place_without_the_artifact_says_so(store: Store, uri: str, lines: str) -> None:
    store.artifact = Artifact(uri, store.artifact.digest)
    with pytest.raises(CannotFetch, match=lines):
        store.fetch()


def test_a_disk_that_is_too_small_is_noticed_before(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1_000_000})())
    with pytest.raises(CannotFetch, match=r"has room for 0.0 GB and the artifact needs 1.1 GB more"):
        store.fetch()


def test_a_disk_that_fills_meanwhile_is_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(s3_artifact._Beginning, "write", full)
    with pytest.raises(CannotFetch, match=r"the disk of .*cache is full; the part that arrived is kept"):
        store.fetch()


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("AccessDenied", r"this node may not read s3://models/llama/3: its role needs s3:GetObject and s3:ListBucket"),
        ("PermanentRedirect", r"the bucket of s3://models/llama/3 is in eu-west-1: set AWS_REGION"),
        ("ExpiredToken", r"AWS credentials for .* have expired"),
        ("RequestTimeTooSkewed", r"this node's clock is wrong"),
        ("SomethingNew", r"S3 refused s3://models/llama/3: An error occurred \(SomethingNew\)"),
    ],
)
def test_a_refusal_of_s3_says_what_would_help(
    store: Store, monkeypatch: pytest.MonkeyPatch, code: str, lines: str
) -> None:
    headers = {"HTTPHeaders": {"x-amz-bucket-region": "eu-west-1"}}

    def refuse(*_: Any) -> Any:
        raise ClientError({"Error": {"Code": code}, "ResponseMetadata": headers}, "GetObject")

    monkeypatch.setattr(s3_artifact, "_manifest", refuse)
    with pytest.raises(CannotFetch, match=lines):
        store.fetch()


def test_a_node_without_credentials_says_so(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # cached
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    with pytest.raises(CannotFetch, match=r"this node has no AWS credentials; give its instance a role"):
        store.fetch()


def test_a_silent_network_is_an_error_with_a_reason(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setattr("engine_agent.engines.s3_artifact.ATTEMPTS", 1)
    with pytest.raises(CannotFetch, match=r"s3://models/llama/3 did not arrive: .*kept for the next attempt"):
        store.fetch()


@pytest.mark.parametrize(
    ("arrived", "total", "words"),
    [
        (0, 0, "fetching the artifact"),
        (3_100_000_000, 12_000_000_000, "fetching 3.1 of 12 GB"),
        (-5, 900, "fetching 0 of 900 B"),
        (40_000_000, 269_080_000, "fetching 40 of 269.1 MB"),
    ],
)
def test_progress_is_said_in_one_unit(arrived: int, total: int, words: str) -> None:
    assert fetching_words(arrived, total) == words
