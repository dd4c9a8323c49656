"""Addresses of sinks, entries of lines, and waits between attempts."""

import json

import pytest

from kernel.outbound import RefusedUrl, choose_address
from traffic.batch_sinks.planner import (
    BadSinkUrl,
    DeadLetter,
    SinkSettings,
    SinkValue,
    entry_of,
    parse_valkey_url,
    part_name,
    retry_wait_s,
    slots_of,
)

LINE = json.dumps({"custom_id": "ä {batch}", "error": None, "response": {"body": {"a": 1}}}).encode() + b"\n"
NAMES = {"batch": "batch_1", "tenant": "acme"}


def test_addresses_have_a_host_and_perhaps_tls() -> None:
    address = parse_valkey_url("valkeys://cache.example:6380/3")
    assert (address.host, address.port, address.database, address.tls) == ("cache.example", 6380, 3, True)
    assert parse_valkey_url("redis://cache.example").port == 6379


@pytest.mark.parametrize(
    "url",
    ["http://a", "valkey://", "valkey://u:p@a", "valkey://a:99999", "valkey://a/16", "valkey://a/x", "valkey://a?db=1",
     "valkey://a b", "unix:///tmp/x"],
)  # fmt: skip
def test_an_address_of_another_form_is_refused(url: str) -> None:
    with pytest.raises(BadSinkUrl):
        parse_valkey_url(url)


def test_private_addresses_and_public_ones_without_tls_are_refused() -> None:
    for url, address in (("valkeys://a", "169.254.169.254"), ("valkeys://a", "10.0.0.1"), ("valkey://a", "8.8.8.8")):
        with pytest.raises(RefusedUrl):
            choose_address(parse_valkey_url(url).target, [address], ())
    assert choose_address(parse_valkey_url("valkeys://a").target, ["8.8.8.8"], ()) == "8.8.8.8"


def test_a_line_becomes_a_key_and_a_value() -> None:
    entry = entry_of(LINE, "{tenant}:{batch}:{custom_id}", SinkValue.BODY, NAMES)
    assert (entry.key.decode(), entry.value) == ("acme:batch_1:ä {batch}", b'{"a":1}')
    assert entry_of(LINE, "{custom_id}", SinkValue.LINE, NAMES).value == LINE
    error = json.dumps({"custom_id": "a", "response": None, "error": {"code": "batch_expired"}}).encode()
    assert json.loads(entry_of(error, "{custom_id}", SinkValue.BODY, NAMES).value) == {
        "error": {"code": "batch_expired"}
    }


@pytest.mark.parametrize("text", [b"{", b"[]", b"{}", LINE.replace(b"batch", b"x" * 2000)])
def test_a_line_that_has_no_key_is_a_dead_letter(text: bytes) -> None:
    with pytest.raises(DeadLetter):
        entry_of(text, "{custom_id}", SinkValue.BODY, NAMES)


def test_attempts_wait_longer_and_end() -> None:
    settings = SinkSettings(attempts_most=4, first_retry_s=1, longest_retry_s=3)
    assert [retry_wait_s(attempts, settings) for attempts in (1, 2, 3, 4)] == [1.0, 2.0, 3.0, None]


def test_parts_are_numbered_by_file() -> None:
    assert part_name(in_errors=False, number=7) == "output-00007.jsonl"
    assert part_name(in_errors=True, number=0) == "errors-00000.jsonl"


def test_slots_of_a_cluster_are_those_of_its_nodes() -> None:
    answer = [[0, 1, [b"10.0.0.1", 6379, b"id"]], [2, 2, [b"", 6380, b"id"], [b"10.0.0.3", 6379, b"id"]]]
    expected = {0: ("10.0.0.1", 6379), 1: ("10.0.0.1", 6379), 2: ("asked", 6380)}
    assert slots_of(answer, ("asked", 6379)) == expected


@pytest.mark.parametrize(
    "answer",
    [
        b"OK",
        None,
        7,
        [1],
        [[0, 10**12, [b"10.0.0.1", 6379]]],
        [[5, 1, [b"h", 1]]],
        [[0, 1, []]],
        [[0, 1, [b"h", b"x"]]],
    ],
)
def test_what_a_cluster_does_not_answer_is_refused(answer: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        slots_of(answer, ("asked", 6379))
