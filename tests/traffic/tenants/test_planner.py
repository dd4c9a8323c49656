"""Parsing of S3 addresses, and prefixes that contain others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traffic.tenants.planner import BadObjectUri, ObjectUri, parse_object_uri


@pytest.mark.parametrize(
    ("text", "bucket", "key"),
    [
        ("s3://acme-in", "acme-in", ""),
        ("s3://acme-in/", "acme-in", ""),
        ("s3://acme-in/a/b/", "acme-in", "a/b"),
        ("s3://123/ü b", "123", "ü b"),
    ],
)
def test_a_place_is_a_bucket_and_a_prefix(text: str, bucket: str, key: str) -> None:
    assert parse_object_uri(text) == ObjectUri(bucket, key)


@pytest.mark.parametrize(
    "text",
    [
        "", "acme-in/a", "http://acme-in/a", "S3://acme-in/a", "s3://", "s3://ab/a", "s3:///a", "s3://Acme/a",
        "s3://acme.in/a", "s3://127.0.0.1/a", "s3://acme_in/a", "s3://-acme/a", "s3://user@acme/a", "s3://acme:80/a",
        "s3://arn:aws:s3:us-east-1:123456789012:accesspoint/other/object/a", "s3://acme-in/../other", "s3://acme-in/a/./b",
        "s3://acme-in/a//b", "s3://acme-in//a", "s3://acme-in/a\n", "s3://acme-in/a\0b", "s3://acme-in/a?versionId=1",
        "s3://acme-in/a#b", "s3://acme-in/" + "x" * 901, "s3://acme-in/\ud800",
    ],
)  # fmt: skip
def test_anything_else_is_none(text: str) -> None:
    with pytest.raises(BadObjectUri):
        parse_object_uri(text)


@pytest.mark.parametrize("text", ["s3://acme-in", "s3://acme-in/", "s3://acme-in/a/"])
def test_a_place_is_no_object(text: str) -> None:
    with pytest.raises(BadObjectUri, match="must name an object"):
        parse_object_uri(text, is_object=True)


def test_whole_names_between_slashes_count() -> None:
    place = parse_object_uri("s3://acme-in/team")
    assert place.covers(parse_object_uri("s3://acme-in/team/a.jsonl", is_object=True))
    assert place.covers(place)
    for other in ("s3://acme-in/teams/a", "s3://acme-in/tea", "s3://acme-in", "s3://acme-inn/team/a"):
        assert not place.covers(parse_object_uri(other))
    assert parse_object_uri("s3://acme-in").overlaps(place)
    assert place.overlaps(parse_object_uri("s3://acme-in"))


@given(st.text())
def test_whatever_is_taken_reads_the_same_again(text: str) -> None:
    try:
        uri = parse_object_uri(f"s3://{text}")
    except BadObjectUri:
        return
    assert parse_object_uri(str(uri)) == uri
    assert ".." not in uri.key.split("/")
