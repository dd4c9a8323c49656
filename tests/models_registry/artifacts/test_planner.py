"""Artifacts must be in allowed places, match their manifest, and stay within limits."""

from dataclasses import replace

import pytest

from engine_agent.protocol.manifest import BadArtifact, Manifest
from models_registry.artifacts.planner import (
    ArtifactLimits,
    Place,
    check_manifest,
    check_sizes,
    check_source,
    parse_place,
    size_words,
)

PLACE = Place("s3", "models", "llama/3")
MANIFEST = Manifest({"a": "0" * 64, "b/c": "1" * 64}, {})
LIMITS = ArtifactLimits()


@pytest.mark.parametrize(
    ("uri", "place", "text"),
    [
        ("file:///srv/models/llama", Place("file", "", "/srv/models/llama"), "file:///srv/models/llama"),
        ("file://localhost/srv/a%20b/", Place("file", "", "/srv/a b"), "file:///srv/a b"),
        ("s3://models", Place("s3", "models", ""), "s3://models"),
        ("s3://models/llama/3/", PLACE, "s3://models/llama/3"),
    ],
)
def test_a_uri_is_a_folder_or_a_place_in_a_bucket(uri: str, place: Place, text: str) -> None:
    assert parse_place(uri) == place
    assert str(place) == text


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("https://models.example.com/llama", "is not an artifact URI; it must be file:///absolute/path or s3://"),
        ("file://other-host/srv", "is not an artifact URI"),
        ("srv/models", "is not an artifact URI"),
        ("file:///", "is not an artifact URI"),
        ("s3://Models/llama", "is not an artifact URI"),
        ("s3://user:secret@models/llama", "is not an artifact URI"),
        ("file:///srv/../etc", "leaves its folder"),
        ("file:///srv/%2e%2e/etc", "leaves its folder"),
        ("file:///srv/a%00b", "leaves its folder"),
        ("s3://models/llama?versionId=1", "has spaces, a query or a fragment"),
        ("file:///srv/a b", "has spaces, a query or a fragment"),
        ("s3://[models/llama", "is not a URI"),
    ],
)
def test_everything_else_is_refused_by_name(uri: str, message: str) -> None:
    with pytest.raises(BadArtifact, match=message):
        parse_place(uri)


@pytest.mark.parametrize(
    ("source", "holds"),
    [
        ("s3://models", True),
        ("s3://models/llama", True),
        ("s3://models/llama/3", True),
        ("s3://models/llam", False),
        ("s3://models/llama/3/deeper", False),
        ("s3://model", False),
        ("file:///models/llama", False),
    ],
)
def test_a_source_holds_what_lies_in_it(source: str, holds: bool) -> None:
    if holds:
        check_source(PLACE, [parse_place(source)])
    else:
        with pytest.raises(BadArtifact, match="s3://models/llama/3 is outside the allowed sources"):
            check_source(PLACE, [parse_place(source)])


def test_without_sources_nothing_is_allowed() -> None:
    with pytest.raises(BadArtifact, match="SWITCHYARD_ARTIFACT_SOURCES has none"):
        check_source(PLACE, [])


def test_a_manifest_that_is_the_expected_one_passes_and_so_does_any_where_none_is_expected() -> None:
    check_manifest(PLACE, MANIFEST, MANIFEST.digest, LIMITS)
    check_manifest(PLACE, MANIFEST, "", LIMITS)
    check_sizes(PLACE, MANIFEST, {"a": 1, "b/c": 2}, LIMITS)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (MANIFEST, "has the digest sha256:.*, but the version expects sha256:00"),
        (Manifest({}, {}), "lists no file"),
        (Manifest({"../x": "0" * 64}, {}), r"lists '../x', which is outside"),
        (Manifest({str(n): "0" * 64 for n in range(4)}, {}), "lists 4 files; at most 3 may be"),
    ],
)
def test_a_manifest_is_refused_before_its_files_are_read(manifest: Manifest, message: str) -> None:
    expected = "sha256:00" if manifest is MANIFEST else ""
    with pytest.raises(BadArtifact, match=message):
        check_manifest(PLACE, manifest, expected, replace(LIMITS, files=3))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"a": 1}, "s3://models/llama/3/b/c is missing; 1 files of manifest.json are missing in total"),
        ({"a": 1, "b/c": 2, "d": 3}, "s3://models/llama/3/d is not in manifest.json"),
        ({"a": 5_000_000_000, "b/c": 2}, r"has 5.0 GB; the limit is 4.0 GB"),
    ],
)
def test_what_lies_there_must_be_what_the_manifest_lists(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(BadArtifact, match=message):
        check_sizes(PLACE, MANIFEST, sizes, replace(LIMITS, artifact_bytes=4_000_000_000))


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0 B"), (999, "999 B"), (8002, "8.0 kB"), (269_080_000, "269.1 MB"), (4 * 10**12, "4.0 TB")],
)
def test_sizes_are_said_in_the_unit_that_fits(size: int, words: str) -> None:
    assert size_words(size) == words
