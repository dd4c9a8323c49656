"""An adapter on the running fleet: a rollout brings it under load, and its requests meet the cells that have it."""

import pytest

from lab.steady_load import Answer
from tests.asking import CLIENT
from tests.scenarios.running_fleet import AskedFleet, eventually
from tests.scenarios.test_healing import under_load
from tests.scenarios.test_rollouts import ended, failed, start, versions

pytestmark = [pytest.mark.long, pytest.mark.scenario, pytest.mark.timeout(900)]

ADAPTER = "acme/support"


def ask(fleet: AskedFleet) -> tuple[int, str]:
    """Status of a request for the adapter, and which model answered or which error came."""
    body = {"model": ADAPTER, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    answer = CLIENT.post(f"{fleet.ingress()}/v1/chat/completions", json=body, timeout=60)
    said = answer.json()
    return answer.status_code, said["model"] if answer.is_success else said["error"]["code"]


def listed(fleet: AskedFleet) -> dict[str, str | None]:
    models = CLIENT.get(f"{fleet.ingress()}/v1/models").json()["data"]
    return {model["id"]: model.get("parent") for model in models}


@pytest.mark.anywhere
def test_a_rollout_brings_an_adapter_and_takes_it_back_while_nobody_is_answered_by_another_model(
    fleet: AskedFleet,
) -> None:
    stable, _ = fleet.versions()
    cells = len(versions(fleet))
    fleet.post(
        "model-versions",
        {"model": "sim-70b", "version": "tuned", "based_on": stable, "adapters": [{"name": ADAPTER}]},
    )
    fleet.post("model-versions/sim-70b@tuned/validate")
    eventually(lambda: fleet.api("model-versions/sim-70b@tuned")["state"] == "validated")
    assert ask(fleet) == (404, "model_not_found")
    asked: list[tuple[int, str]] = []

    def roll_out(_: list[Answer]) -> None:
        rollout = start(fleet, "tuned")

        def is_over() -> bool:
            asked.append(ask(fleet))
            return str(fleet.api(f"rollouts/{rollout}")["state"]) == "succeeded"

        eventually(is_over)

    assert failed(under_load(fleet, roll_out)) == []
    assert versions(fleet) == ["sim-70b@tuned"] * cells
    eventually(lambda: ask(fleet) == (200, ADAPTER))
    assert set(asked) <= {(404, "model_not_found"), (200, ADAPTER)}, "never another model, and never a cell without it"
    assert asked == sorted(asked, reverse=True), "once it is there it stays"
    assert listed(fleet)[ADAPTER] == "sim-70b"
    assert ended(fleet, start(fleet, stable.partition("@")[2]))["state"] == "succeeded"
    eventually(lambda: ask(fleet) == (404, "model_not_found"))
    assert ADAPTER not in listed(fleet)
