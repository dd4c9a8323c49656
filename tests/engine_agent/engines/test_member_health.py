"""A member without an API reports its health, and changes without delay."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine_agent.engines.member_health import MemberHealth
from engine_agent.protocol import local_servers
from engine_agent.protocol.local_servers import long_poll_query
from tests.asking import CLIENT
from tests.engine_agent.engines.vllm.cell.members import LIMIT_S
from tests.ports import free_port


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def health(port: int) -> Iterator[MemberHealth]:
    health = MemberHealth(port, "importing vLLM")
    yield health
    health.close()


def test_it_says_why_it_is_not_ready_and_when_it_is(health: MemberHealth, port: int) -> None:
    answer = CLIENT.get(f"http://127.0.0.1:{port}/health")
    assert (answer.status_code, answer.json()["reason"]) == (503, "importing vLLM")
    health.say("")
    answer = CLIENT.get(f"http://127.0.0.1:{port}/health")
    assert (answer.status_code, answer.json()["reason"]) == (200, "")
    assert CLIENT.get(f"http://127.0.0.1:{port}/metrics").status_code == 404


def test_who_knows_that_hears_of_a_change_at_once(
    health: MemberHealth, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_servers, "LONG_POLL_S", LIMIT_S)
    url = f"http://127.0.0.1:{port}/health"
    known = CLIENT.get(url).json()["state"]
    with ThreadPoolExecutor(1) as asking:
        asked = asking.submit(CLIENT.get, url + long_poll_query(known), timeout=2 * LIMIT_S)
        health.say("building the engine")
        answer = asked.result().json()
    assert answer["reason"] == "building the engine"
    assert answer["held_ms"] < LIMIT_S * 1000
