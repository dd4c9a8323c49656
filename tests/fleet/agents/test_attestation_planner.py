"""Rules for proofs: well-formed, and checked before STS is called."""

import re
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.agents.planner import BODY_BYTES, BadProof, Caller, ProofRefused, check_proof, read_caller, read_proof
from tests.fleet.proofs import HOST, NONCE, SERVER, body_of, digest_of, proof
from tests.fleet.rows import NOW

SERVERS = frozenset({SERVER})


def test_a_proof_says_for_whom_of_when_and_by_which_nonce() -> None:
    read = read_proof(body_of(proof()))

    assert (read.region, read.host, read.server) == ("us-east-1", HOST, SERVER)
    assert (read.nonce_digest, read.signed_at) == (digest_of(NONCE), NOW)
    assert (read.unit, read.address) == ("u-1", "10.1.16.4")
    check_proof(read, servers=SERVERS, sts_host=HOST, now=NOW)


def header(name: str, value: object) -> bytes:
    made = proof()
    made["headers"][name] = value
    return body_of(made)


def signing(before: str, after: str) -> bytes:
    return header("authorization", proof()["headers"]["authorization"].replace(before, after))


def without(name: str) -> bytes:
    made = proof()
    del made["headers"][name]
    return body_of(made)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b" " * (BODY_BYTES + 1), "the proof has 8193 bytes; the limit is 8192"),
        (b"{}", "the proof must have the members address, headers, unit and no others"),
        (b"[]", "the proof must have the members"),
        (b"nonsense", "the proof is not JSON"),
        (b"\xff\xfe{}", "the proof is not JSON"),
        (body_of(proof()).replace(b'"unit"', b'"unit": "u-2", "unit"'), "the member 'unit' is there twice"),
        (body_of(proof()).replace(b'"host"', b'"host": "x", "host"'), "the member 'host' is there twice"),
        (body_of({**proof(), "more": 1}), "and no others"),
        (body_of({**proof(), "headers": []}), "headers must have the members"),
        (without("x-switchyard-server"), "headers must have the members"),
        (header("x-forwarded-host", "sts.example"), "headers must have the members"),
        (header("host", "sts.example/path"), "host does not match"),
        (header("host", "sts\r\nx: y"), "host does not match"),
        (header("x-amz-date", ["20261121T120000Z"]), "x-amz-date does not match"),
        (header("x-amz-date", "20269921T120000Z"), "is not a date"),
        (header("x-amz-date", "20261122T120000Z"), "of another day"),
        (header("x-amz-security-token", "a\nb"), "x-amz-security-token does not match"),
        (header("x-amz-security-token", "a" * 4097), "x-amz-security-token does not match"),
        (header("x-switchyard-server", f"{SERVER};AB"), "x-switchyard-server does not match"),
        (signing(";x-switchyard-server", ""), "the signature covers the headers .* it must cover"),
        (signing("host;", ""), "the signature covers the headers"),
        (signing("/sts/", "/iam/"), "authorization does not match"),
        (signing("AWS4-HMAC-SHA256 ", "Basic "), "authorization does not match"),
        (body_of({**proof(), "unit": "../u"}), "unit does not match"),
        (body_of({**proof(), "address": "fe80::1"}), "address does not match"),
        (body_of({**proof(), "address": None}), "address does not match"),
    ],
)
def test_what_is_no_proof_is_refused_by_name(body: bytes, says: str) -> None:
    with pytest.raises(BadProof, match=says):
        read_proof(body)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ({"server": "other.example"}, "signed for the server other.example, and this one is control.example:8443"),
        ({"at": NOW - timedelta(minutes=15, seconds=1)}, "within 15 minutes of now, 12:00:00 UTC"),
        ({"at": NOW + timedelta(minutes=15, seconds=1)}, "within 15 minutes of now, 12:00:00 UTC"),
        ({"host": "sts.eu-west-1.amazonaws.com"}, "a request to sts.eu-west-1.amazonaws.com, not to sts.us-east"),
    ],
)
def test_a_proof_for_others_or_of_another_time_is_refused(made: dict[str, Any], says: str) -> None:
    with pytest.raises(ProofRefused, match=re.escape(says)):
        check_proof(read_proof(body_of(proof(**made))), servers=SERVERS, sts_host=HOST, now=NOW)


def test_a_quarter_of_an_hour_is_not_too_late() -> None:
    read = read_proof(body_of(proof(at=NOW - timedelta(minutes=15))))
    check_proof(read, servers=SERVERS, sts_host=HOST, now=NOW)


@pytest.mark.slow
@given(st.binary(max_size=300) | st.recursive(st.none() | st.text(), st.lists).map(lambda made: repr(made).encode()))
def test_nothing_makes_it_fail_otherwise(body: bytes) -> None:
    with pytest.raises(BadProof):
        read_proof(body)


def test_a_machine_is_the_session_of_its_role() -> None:
    caller = read_caller("arn:aws:sts::123456789012:assumed-role/node/i-0123456789abcdef0")
    assert caller == Caller("123456789012", "node", "i-0123456789abcdef0")
    assert read_caller("arn:aws-us-gov:sts::123456789012:assumed-role/node/i-0123456789abcdef0") == caller


@pytest.mark.parametrize(
    "arn",
    [
        "arn:aws:iam::123456789012:user/i-0123456789abcdef0",
        "arn:aws:iam::123456789012:root",
        "arn:aws:sts::123456789012:assumed-role/node/ada",
        "arn:aws:sts::123456789012:assumed-role/node/i-0123456789abcdef0/more",
        "arn:aws:sts::123456789012:assumed-role/node/I-0123456789ABCDEF0",
        "arn:aws:sts::123456789012:federated-user/i-0123456789abcdef0",
        "",
    ],
)
def test_nobody_else_is_a_machine(arn: str) -> None:
    with pytest.raises(ProofRefused, match="which is not a machine"):
        read_caller(arn)
