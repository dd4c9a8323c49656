"""Calls to STS reach one host, follow no redirect, and are limited in time and size; invalid answers are rejected."""

import threading
from collections.abc import Iterator

import pytest

from fleet.agents.planner import BODY, CONTENT_TYPE, ProofRefused, read_proof
from fleet.clouds.aws import identity as caller_identity
from fleet.clouds.aws.identity import ANSWER_BYTES, StsUnavailable, caller_arn, sts_host, sts_url
from tests.fleet.clouds.aws.sts_server import Sts, answering
from tests.fleet.proofs import body_of, proof

ARN = "arn:aws:sts::123456789012:assumed-role/node/i-0123456789abcdef0"


@pytest.fixture
def sts() -> Iterator[Sts]:
    with answering() as sts:
        yield sts


def ask(sts: Sts) -> str:
    return caller_arn(read_proof(body_of(proof(host=sts.host))), sts.url)


def test_each_region_has_one_host() -> None:
    assert sts_url("eu-west-1", {}) == "https://sts.eu-west-1.amazonaws.com"
    assert sts_url("cn-north-1", {}) == "https://sts.cn-north-1.amazonaws.com.cn"
    assert sts_host("eu-west-1", {"AWS_ENDPOINT_URL": "http://10.0.0.200:5000/"}) == "10.0.0.200:5000"
    both = {"AWS_ENDPOINT_URL": "http://10.0.0.200:5000", "AWS_ENDPOINT_URL_STS": "http://10.0.0.201:5000"}
    assert sts_url("eu-west-1", both) == "http://10.0.0.201:5000"


def test_what_was_signed_is_asked_and_nothing_else(sts: Sts) -> None:
    sts.knows(ARN)

    assert ask(sts) == ARN
    [(path, headers, body)] = sts.asked
    assert (path, body) == ("/", BODY.encode())
    signed = {**proof(host=sts.host)["headers"], "content-type": CONTENT_TYPE}
    assert {name: headers[name] for name in signed} == signed
    assert set(headers) - set(signed) == {"content-length", "connection", "accept-encoding"}


def test_a_signature_that_sts_refuses(sts: Sts) -> None:
    for code, status in (("SignatureDoesNotMatch", 403), ("ExpiredToken", 400), ("InvalidClientTokenId", 403)):
        sts.refuses(code, status)
        with pytest.raises(ProofRefused, match=f"STS rejected the signature: {code}"):
            ask(sts)


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (500, b"<html>", "answered 500"),
        (503, b"<Error><Code>ServiceUnavailable</Code></Error>", "answered 503"),
        (400, b"<Error><Code>Throttling</Code></Error>", "answered 400"),
        (403, b"a proxy says no", "answered 403"),
        (200, b"", "did not return the signer"),
        (200, b"<html>Sign in to the hotel</html>", "did not return the signer"),
        (200, f"<Arn>{ARN}</Arn>".encode(), "did not return the signer"),
        (200, f"<GetCallerIdentityResponse><Arn>{ARN}</Arn><Arn>{ARN}</Arn>".encode(), "did not return the signer"),
        (200, b"<GetCallerIdentityResponse>" + b" " * ANSWER_BYTES, f"answered more than {ANSWER_BYTES} bytes"),
        (200, b'{"GetCallerIdentityResponse": {}}', "did not return the signer"),
    ],
)
def test_what_is_no_answer_of_sts_is_none(sts: Sts, status: int, body: bytes, says: str) -> None:
    sts.status, sts.body = status, body
    with pytest.raises(StsUnavailable, match=says):
        ask(sts)


def test_a_redirect_is_followed_nowhere(sts: Sts) -> None:
    with answering() as other:
        other.knows(ARN)
        for status in (301, 302, 307, 308):
            sts.status, sts.headers = status, {"Location": other.url}
            with pytest.raises(StsUnavailable, match=f"answered {status}"):
                ask(sts)
        assert other.asked == []


def test_an_answer_that_does_not_come_is_given_up(sts: Sts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller_identity, "LIMIT_S", 0.2)
    given_up = threading.Event()
    sts.before = lambda: bool(given_up.wait(30))
    with pytest.raises(StsUnavailable, match="does not answer"):
        ask(sts)
    given_up.set()


def test_an_answer_by_the_drop_is_given_up(sts: Sts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller_identity, "LIMIT_S", 0.5)
    sts.headers, sts.drips = {"Content-Length": "16000"}, True
    with pytest.raises(StsUnavailable):
        ask(sts)


def test_nobody_listens() -> None:
    with answering() as sts:
        pass
    with pytest.raises(StsUnavailable, match="does not answer"):
        ask(sts)
