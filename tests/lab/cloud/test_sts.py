"""GetCallerIdentity of the test cloud accepts only valid signatures."""

import re
from typing import Any

import pytest
import requests
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from lab.cloud.server import World

pytestmark = pytest.mark.cloud

MACHINE = "i-0123456789abcdef0"
BODY = "Action=GetCallerIdentity&Version=2011-06-15"
HEADER = "X-Switchyard-Server"


@pytest.fixture
def role(world: World) -> dict[str, str]:
    """Credentials as an instance profile gives them to a machine."""
    arn = f"arn:aws:iam::{world.account}:role/node"
    made: dict[str, str] = world.client("sts").assume_role(RoleArn=arn, RoleSessionName=MACHINE)["Credentials"]
    return made


def signed(world: World, role: dict[str, str]) -> AWSRequest:
    """A signed request, with an additional signed header."""
    headers = {HEADER: "control.example;0f", "Content-Type": "application/x-www-form-urlencoded"}
    request = AWSRequest("POST", f"{world.endpoint}/", headers, BODY)
    keys = Credentials(role["AccessKeyId"], role["SecretAccessKey"], role["SessionToken"])
    SigV4Auth(keys, "sts", "us-east-1").add_auth(request)
    return request


def sent(request: AWSRequest, body: str = BODY, **headers: str) -> tuple[int, str]:
    """Forwards the request as another party: status, and the caller's ARN or the error code."""
    everything: dict[str, Any] = {
        **dict(request.headers.items()),
        **{key.replace("_", "-"): v for key, v in headers.items()},
    }
    answer = requests.post(str(request.url), data=body, headers=everything, timeout=10)
    found = re.search("<(Arn|Code)>([^<]+)", answer.text)
    return answer.status_code, found[2] if found else answer.text


def test_a_machine_is_named_by_its_session(world: World, role: dict[str, str]) -> None:
    expected = f"arn:aws:sts::{world.account}:assumed-role/node/{MACHINE}"

    assert sent(signed(world, role)) == (200, expected)
    keys: dict[str, Any] = {"aws_access_key_id": role["AccessKeyId"], "aws_secret_access_key": role["SecretAccessKey"]}
    client = world.client("sts", **keys, aws_session_token=role["SessionToken"])
    assert client.get_caller_identity()["Arn"] == expected
    assert world.client("sts").get_caller_identity()["Arn"] == f"arn:aws:iam::{world.account}:user/control"


def test_nothing_that_was_signed_may_change(world: World, role: dict[str, str]) -> None:
    request = signed(world, role)

    refused = (403, "SignatureDoesNotMatch")
    assert sent(request, X_Switchyard_Server="control.example;1f") == refused
    assert sent(request, Host="sts.eu-west-1.amazonaws.com") == refused
    assert sent(request, body=f"{BODY}&More=1") == refused
    assert sent(request, X_Unsigned="anything")[0] == 200


def test_another_secret_another_token_and_a_stranger(world: World, role: dict[str, str]) -> None:
    assert sent(signed(world, {**role, "SecretAccessKey": "guessed"})) == (403, "SignatureDoesNotMatch")
    assert sent(signed(world, {**role, "SessionToken": "guessed"})) == (403, "InvalidClientTokenId")
    assert sent(signed(world, {**role, "AccessKeyId": "AKIANOBODY"})) == (403, "InvalidClientTokenId")


def test_a_signature_of_another_time(world: World, role: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    request = signed(world, role)
    monkeypatch.setattr("lab.cloud.account.VALID_S", -1.0)  # as if the quarter of an hour had passed

    assert sent(request) == (403, "SignatureDoesNotMatch")
    assert sent(request, X_Amz_Date="yesterday") == (400, "IncompleteSignature")


def test_host_and_date_must_be_signed(world: World, role: dict[str, str]) -> None:
    request = signed(world, role)
    unsigned = str(request.headers["Authorization"]).replace("host;", "")

    assert sent(request, Authorization=unsigned) == (400, "IncompleteSignature")
