"""A folder becomes an immutable artifact in S3 that nodes can fetch."""

import os
from collections.abc import Iterator
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from engine_agent.engines.artifacts import acquire, describe_folder, entry_of, make_room, write_manifest
from engine_agent.engines.s3_artifact import Arrived, download
from engine_agent.protocol.manifest import MANIFEST_NAME
from engine_agent.protocol.messages import Artifact
from models_registry.artifacts.services import bucket
from tests.engine_agent.engines.s3_server import BUCKET, empty_bucket, s3_server

pytestmark = pytest.mark.slow

URI = f"s3://{BUCKET}/llama/3"
FILES = {"model.safetensors": b"weights " * 1000, "tokenizer/vocab.json": b"{}"}


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def client(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    return empty_bucket(s3_url, monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / name).write_bytes(content)
    return tmp_path / "model"


def push(folder: Path, uri: str = URI) -> tuple[str, str]:
    """The digest, and the progress messages."""
    out, said = StringIO(), StringIO()
    call_command("artifact_push", str(folder), uri, stdout=out, stderr=said)
    return out.getvalue().strip(), said.getvalue()


def keys(client: Any) -> set[str]:
    return {item["Key"] for item in client.list_objects_v2(Bucket=BUCKET).get("Contents", ())}


def test_what_was_pushed_is_what_a_node_fetches(client: Any, folder: Path, tmp_path: Path) -> None:
    digest, said = push(folder)
    assert digest == describe_folder(folder, {}).digest
    assert "model.safetensors: 8.0 kB\n" in said
    assert keys(client) == {f"llama/3/{name}" for name in (*FILES, MANIFEST_NAME)}
    entry = entry_of(digest, tmp_path / "cache")
    room = partial(make_room, entry, limit=None)
    os.close(
        acquire(entry, lambda: download(Artifact(URI, digest), entry, room, Arrived(), lambda _: None), lambda: None)
    )
    assert (entry.folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_nothing_is_written_over_by_a_second_push(client: Any, folder: Path) -> None:
    push(folder)
    (folder / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(CommandError, match=r"llama/3 already has another artifact, and artifacts never change"):
        push(folder)
    stored = client.get_object(Bucket=BUCKET, Key="llama/3/model.safetensors")["Body"].read()
    assert stored == FILES["model.safetensors"]


def test_two_pushes_at_once_end_with_one_manifest(client: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket.BucketPrefix, "holds", lambda *_: False)  # each checked before the other wrote
    push(folder)
    (folder / "model.safetensors").rename(folder / "renamed.safetensors")
    before = client.get_object(Bucket=BUCKET, Key=f"llama/3/{MANIFEST_NAME}")["Body"].read()
    with pytest.raises(CommandError, match=r"was written by another push meanwhile and was left unchanged"):
        push(folder)
    assert client.get_object(Bucket=BUCKET, Key=f"llama/3/{MANIFEST_NAME}")["Body"].read() == before


def test_a_push_that_broke_off_goes_on_with_what_is_missing(client: Any, folder: Path) -> None:
    push(folder)
    for name in (MANIFEST_NAME, "model.safetensors"):
        client.delete_object(Bucket=BUCKET, Key=f"llama/3/{name}")
    said = push(folder)[1]
    assert "vocab.json: 2 B, already uploaded\n" in said
    assert "model.safetensors: 8.0 kB\n" in said


def test_a_strange_file_in_the_prefix_is_not_written_over(client: Any, folder: Path) -> None:
    client.put_object(Bucket=BUCKET, Key="llama/3/model.safetensors", Body=b"somebody's")
    with pytest.raises(CommandError, match=r"model.safetensors exists with other content: push to another prefix"):
        push(folder)
    assert f"llama/3/{MANIFEST_NAME}" not in keys(client)


def test_a_large_file_comes_in_parts(client: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "PART_BYTES", 5 * 1024**2)
    (folder / "model.safetensors").write_bytes(b"w" * (6 * 1024**2))
    push(folder)
    assert client.head_object(Bucket=BUCKET, Key="llama/3/model.safetensors")["ETag"].endswith('-2"')


def test_a_manifest_in_the_folder_must_be_of_its_files(client: Any, folder: Path) -> None:
    write_manifest(folder, describe_folder(folder, {"made": "here"}))
    (folder / "model.safetensors").write_bytes(b"changed since")
    with pytest.raises(CommandError, match=r"manifest.json has the digest sha256:.*: remove it to push them"):
        push(folder)
    assert keys(client) == set()


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("s3://nowhere/x", "nowhere"),
        ("file:///models", r"file:///models is not an S3 prefix; it must be s3://bucket/prefix"),
        ("models", r"is not an artifact URI"),
    ],
)
def test_a_place_that_cannot_be_written_is_named(client: Any, folder: Path, uri: str, said: str) -> None:
    with pytest.raises(CommandError, match=said):
        push(folder, uri)


def test_a_folder_that_is_none_is_named(client: Any, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"gone is not a folder"):
        push(tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CommandError, match=r"empty cannot be an artifact: it lists no file"):
        push(tmp_path / "empty")
