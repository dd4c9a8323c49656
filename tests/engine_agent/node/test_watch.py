"""Results of probes, from answers and from silence."""

import pytest

from engine_agent.cell_proxy.health import ProxyStatus
from engine_agent.node.http import HttpClient
from engine_agent.node.watch import (
    EngineAnswer,
    ProbeFailure,
    ProbeResults,
    after_engine,
    after_proxy,
    fetch_proxy_status,
    is_change,
    probe_engine,
    without_engine,
    without_proxy,
)
from engine_agent.protocol.load_messages import Load
from engine_agent.protocol.messages import Health
from engine_agent.protocol.states import Phase
from tests.engine_agent.node.answering import answering

OK = Health(ok=True, checked_s_ago=0.1)
BAD = Health(ok=False, reason="follower 1 is gone")
SLOW = ProbeFailure("did not answer", is_down=False)
REFUSED = ProbeFailure("nothing listens", is_down=True)


def status(health: Health) -> ProxyStatus:
    return ProxyStatus(health=health, load=Load(in_flight=2), phase=Phase.SERVE)


def test_a_proxys_word_is_taken_whole() -> None:
    seen = after_proxy(ProbeResults(proxy_silent_since_s=1.0), status(OK), 5.0)
    assert seen == ProbeResults(OK, Load(in_flight=2), was_ready=True, proxy_phase=Phase.SERVE, proxy_pairs="")


def test_who_was_ready_once_stays_so() -> None:
    assert after_proxy(after_proxy(ProbeResults(), status(OK), 1.0), status(BAD), 2.0).was_ready


def test_a_silent_proxy_says_nothing_of_the_engine_and_the_first_silence_counts() -> None:
    seen = after_proxy(after_proxy(after_proxy(ProbeResults(), status(OK), 1.0), SLOW, 2.0), REFUSED, 3.0)
    assert seen.health == OK
    assert seen.proxy_silent_since_s == 2.0


def test_one_slow_answer_of_an_engine_is_forgiven_and_two_are_not() -> None:
    well = EngineAnswer(OK, "aa")
    once = after_engine(after_engine(ProbeResults(), well), SLOW)
    assert once.health == OK
    assert after_engine(once, SLOW).health == Health(ok=False, reason="did not answer")
    assert after_engine(after_engine(once, well), SLOW).health == OK


def test_what_did_not_answer_is_asked_without_delay() -> None:
    assert after_engine(ProbeResults(), EngineAnswer(OK, "aa")).state == "aa"
    assert after_engine(ProbeResults(state="aa"), SLOW).state == ""
    assert after_proxy(ProbeResults(state="aa"), SLOW, 1.0).state == ""


def test_an_engine_that_refuses_or_never_answered_is_unhealthy_at_once() -> None:
    once = after_engine(ProbeResults(), EngineAnswer(OK))
    assert after_engine(once, REFUSED).health == Health(ok=False, reason="nothing listens")
    assert after_engine(ProbeResults(), SLOW).health == Health(ok=False, reason="did not answer")


def test_what_is_left_to_know_when_a_process_ends() -> None:
    seen = ProbeResults(OK, Load(), was_ready=True, proxy_phase=Phase.SERVE)
    assert without_engine(seen) == ProbeResults(proxy_phase=Phase.SERVE)
    assert without_proxy(seen) == ProbeResults(OK, Load(), was_ready=True)


def test_figures_alone_are_no_news() -> None:
    before = after_proxy(ProbeResults(), status(OK), 1.0)
    same = after_proxy(before, ProxyStatus(Health(ok=True, probe_ms=9.0), Load(in_flight=7), Phase.SERVE), 2.0)
    assert not is_change(before, same)
    assert is_change(before, after_proxy(before, status(BAD), 2.0))
    assert is_change(before, after_proxy(before, SLOW, 2.0))


@pytest.mark.asyncio
async def test_asks_an_engine(http: HttpClient) -> None:
    async with answering(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n") as url:
        said = await probe_engine(http, url)
    assert isinstance(said, EngineAnswer)
    assert said.health.ok
    assert said.health.probe_ms is not None
    assert said.state == ""


@pytest.mark.asyncio
@pytest.mark.parametrize(("body", "reason"), [(b'{"reason": "loading"}', "loading"), (b"no", "the engine answers 503")])
async def test_an_engine_says_why_not(http: HttpClient, body: bytes, reason: str) -> None:
    async with answering(b"HTTP/1.1 503 No\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)) as url:
        said = await probe_engine(http, url)
    assert isinstance(said, EngineAnswer)
    assert (said.health.ok, said.health.reason) == (False, reason)


@pytest.mark.asyncio
async def test_the_time_that_an_answer_was_held_is_not_the_engines(http: HttpClient) -> None:
    body = b'{"reason": "", "state": "aa", "held_ms": 60000}'
    async with answering(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)) as url:
        said = await probe_engine(http, url, "aa")
    assert isinstance(said, EngineAnswer)
    assert (said.health.probe_ms, said.state) == (0.0, "aa")


@pytest.mark.asyncio
async def test_asks_a_proxy_and_takes_nonsense_for_silence(http: HttpClient) -> None:
    body = b'{"health": {"ok": true}, "load": {"in_flight": 1}, "phase": "drain", "in_flight": 1}'
    async with answering(b"HTTP/1.1 200 OK\r\n\r\n" + body) as url:
        assert await fetch_proxy_status(http, url) == ProxyStatus(Health(ok=True), Load(in_flight=1), Phase.DRAIN, 1)
    async with answering(b"HTTP/1.1 200 OK\r\n\r\n{}") as url:
        said = await fetch_proxy_status(http, url)
    assert isinstance(said, ProbeFailure)
    assert "did not answer with a status" in said.reason
