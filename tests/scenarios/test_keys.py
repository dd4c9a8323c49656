"""Application keys over the whole fleet: made and revoked by API, enforced by every ingress, counted on both sides."""

import openai
import pytest

from tests.scenarios.running_fleet import REGIONS, AskedFleet, eventually

pytestmark = [pytest.mark.scenario, pytest.mark.timeout(900)]


def status(fleet: AskedFleet, region: str, key: str) -> int:
    client = openai.OpenAI(base_url=f"{fleet.ingress(region)}/v1", api_key=key, max_retries=0, timeout=60)
    try:
        client.completions.create(model="sim-70b", prompt="hi", max_tokens=2)
    except openai.APIStatusError as error:
        return error.status_code
    return 200


def statuses(fleet: AskedFleet, key: str) -> set[int]:
    return {status(fleet, region, key) for region in REGIONS}


@pytest.mark.anywhere
def test_a_key_opens_every_region_until_it_is_revoked_and_the_lag_is_told(fleet: AskedFleet) -> None:
    made = fleet.post("keys", {"name": "scenario", "tenant": "acme", "deployments": ["sim-70b"]})
    eventually(lambda: statuses(fleet, made["key"]) == {200})
    eventually(lambda: any(row["completion_tokens"] for row in fleet.api("usage", tenant="acme")["rows"]))
    eventually(lambda: fleet.api(f"keys/{made['prefix']}")["requests_24h"] >= len(REGIONS))
    fleet.post(f"keys/{made['prefix']}/revoke", {"why": "the test is over"})
    eventually(lambda: statuses(fleet, made["key"]) == {401})
    eventually(lambda: fleet.api(f"keys/{made['prefix']}")["revocation_lag_s"] is not None)
    assert fleet.api(f"keys/{made['prefix']}")["revocation_lag_s"] > 0
    assert statuses(fleet, "none") == {200}, "nobody else is locked out"
