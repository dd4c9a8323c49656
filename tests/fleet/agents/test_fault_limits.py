"""Limits on the evidence of one node: amount and rate."""

from typing import Any

import pytest

from engine_agent.protocol.codec import FAULT_BYTES_MAX, BadMessage, bounded_fault, decode_up, encode
from engine_agent.protocol.messages import DownMessage, Fault
from engine_agent.protocol.states import AgentKind
from fleet.agents.consumers.handlers import FAULTS_BURST, NodeHandler
from fleet.agents.consumers.hub import AgentSession
from fleet.agents.services.enrolment import AgentIdentity
from tests.fleet.agents.agent_client import hello

LOUD = Fault("xid-79", "GPU fell off the bus", {"dump": "x" * 100_000})


def session_of(node: str) -> AgentSession:
    async def ignore(_: DownMessage | str) -> None:
        return

    return AgentSession(AgentIdentity(AgentKind.NODE, node, "r", node), hello(node), send=ignore, close=ignore)


def test_evidence_that_is_too_long_is_dropped() -> None:
    handler, session = NodeHandler(), session_of("n-a")
    assert not handler.on_message(session, LOUD)
    assert handler.on_message(session, bounded_fault(LOUD))


def test_a_node_that_sends_faults_without_end_has_a_burst_kept_and_others_theirs() -> None:
    handler, fault = NodeHandler(), Fault("xid-79", "again")
    loud = session_of("n-a")
    assert sum(handler.on_message(loud, fault) for _ in range(1000)) <= FAULTS_BURST + 5
    assert not handler.on_message(session_of("n-a"), fault), "another connection of it has no budget of its own"
    assert handler.on_message(session_of("n-b"), fault)


def test_agents_leave_out_what_would_be_dropped_and_say_so() -> None:
    sent = bounded_fault(Fault("s" * 100, "y" * 5000, {"dump": "x" * 100_000}))
    assert (len(sent.signature), len(sent.summary)) == (64, 2000)
    assert sent.evidence["evidence_left_out_bytes"] > 100_000
    assert len(encode(sent)) < FAULT_BYTES_MAX
    assert bounded_fault(Fault("s", "y", {"lines": ["z"] * 20})).evidence == {"lines": ["z"] * 20}


@pytest.mark.parametrize("long", [{"signature": "s" * 65}, {"summary": "y" * 2001}])
def test_longer_names_are_no_message_of_the_protocol(long: dict[str, Any]) -> None:
    with pytest.raises(BadMessage, match="length <= "):
        decode_up(encode(Fault(**{"signature": "s", "summary": "y", **long})))
