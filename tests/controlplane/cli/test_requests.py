"""`switchyard requests`: the comparison of slow requests, failed ones, and one by its id."""

import json
from datetime import timedelta
from typing import Any

import pytest

from controlplane.cli.exit_codes import ExitCode
from fleet.requests.models import RequestSample
from kernel import clock
from tests.controlplane.cli.conftest import Switchyard

pytestmark = pytest.mark.django_db

OWN = {"cell": "c-1", "deployment": "sim", "region": "east", "generation": 1, "kind": "uniform", "status": 200}


def stored(name: str, **columns: Any) -> RequestSample:
    at = clock.now() - timedelta(minutes=5)
    own: dict[str, Any] = {**OWN, "at": at, "first_ms": 100.0, "total_ms": 900.0, "is_stream": True}
    return RequestSample(request=name, **{**own, **columns})


@pytest.fixture(autouse=True)
def samples() -> None:
    slow = {"kind": "slow", "tenant": "big", "first_ms": 4000.0}
    refused = {"cell": "", "kind": "refused", "status": 401, "reason": "invalid_api_key", "first_ms": None}
    RequestSample.objects.bulk_create(
        [
            *(stored(f"ordinary-{n}", tenant="acme") for n in range(30)),
            *(stored(f"slow-{n}", **slow) for n in range(30)),
            stored("failed-1", kind="error", status=500, reason="engine_died", key="1a2b3c4d"),
            stored("refused-1", **refused),
        ]
    )


def test_it_says_what_slow_requests_have_in_common(switchyard: Switchyard) -> None:
    told = switchyard("requests", "--cell", "c-1")
    assert told.code == 0
    assert "100 % of the slow requests have in common: tenant big" in " ".join(told.out.split())
    assert "30 slow and 30 ordinary requests were compared." in told.out + told.err
    document = json.loads(switchyard("requests", "-d", "sim", "-o", "json").out)
    assert (document["slow"], document["findings"][0]["hits"]) == (30, 30)


def test_failed_requests_are_listed_by_key_and_by_id(switchyard: Switchyard) -> None:
    failed = switchyard("requests", "--failed").out
    assert "500 engine_died" in failed
    assert "401 invalid_api_key" in failed
    assert "slow-1" not in failed
    of_key = switchyard("requests", "--key", "1a2b3c4d").out
    assert "failed-1" in of_key
    assert "refused-1" not in of_key
    assert "refused-1" in switchyard("requests", "refused").out
    nothing = switchyard("requests", "--failed", "--region", "mars")
    assert "No sampled request matches." in nothing.out + nothing.err


def test_an_unknown_id_and_a_wrong_range_are_errors(switchyard: Switchyard) -> None:
    unknown = switchyard("requests", "9f1c0de4")
    assert unknown.code == ExitCode.NOT_FOUND
    assert "no sample has a request id that begins with 9f1c0de4" in unknown.err
    assert switchyard("requests", "--cell", "c-1", "--range", "9y").code not in {0, 1}
