"""Who proves the secret of this generation is let in; who does not learns nothing and changes nothing."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from engine_agent.engines.vllm.cell.handshake import Joined, NotYet, Refused, admit, introduce
from engine_agent.engines.vllm.cell.member import Member
from tests.engine_agent.engines.vllm.cell.members import LIMIT_S, SECRET, follower, leader

SOFTWARE = {"vllm": "0.32.0", "torch": "2.13.0"}
LEADER = leader()
FOLLOWER = follower(LEADER)


def free(_: int) -> str:
    return ""


class Meeting:
    """A leader and a caller on the two ends of a connection; the leader's side runs in a thread."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self.leaders_end, self.callers_end = socket.socketpair()

    def leader_admits(self, taken: Any = free, secret: bytes = SECRET) -> "Future[Joined]":
        return self._pool.submit(admit, self.leaders_end, LEADER, secret, SOFTWARE, taken)

    def introduce(self, who: Member = FOLLOWER, secret: bytes = SECRET, software: Any = SOFTWARE) -> Joined:
        return introduce(self.callers_end, who, secret, software)


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    with ThreadPoolExecutor() as pool:
        between = Meeting(pool)
        yield between
        between.leaders_end.close()
        between.callers_end.close()


def test_both_sides_end_with_the_same_key(meeting: Meeting) -> None:
    admitted = meeting.leader_admits()
    introduced = meeting.introduce()
    joined = admitted.result(LIMIT_S)
    assert (joined.rank, joined.node_id) == (1, "n-00000001")
    assert joined.key == introduced.key
    assert len(joined.key) == 32


def test_a_wrong_secret_is_refused_and_both_say_so(meeting: Meeting) -> None:
    admitted = meeting.leader_admits()
    with pytest.raises(NotYet, match="does not prove that it knows the secret of cell c-1"):
        meeting.introduce(secret=b"wrong")
    with pytest.raises(NotYet, match="node n-00000001 does not prove"):
        admitted.result(LIMIT_S)


def test_a_leader_with_another_secret_is_not_believed(meeting: Meeting) -> None:
    meeting.callers_end.settimeout(LIMIT_S)
    meeting.leaders_end.sendall(json.dumps({"cell": "c-1", "generation": 3, "nonce": "00"}).encode() + b"\n")
    meeting.leaders_end.sendall(json.dumps({"proof": "00"}).encode() + b"\n")
    with pytest.raises(NotYet, match="does not prove that it knows the cell's secret"):
        meeting.introduce()


@pytest.mark.parametrize("other", [replace(FOLLOWER, generation=4), replace(FOLLOWER, cell="c-2")], ids=str)
def test_another_generation_or_cell_is_told_whose_this_is(meeting: Meeting, other: Member) -> None:
    admitted = meeting.leader_admits()
    with pytest.raises(NotYet, match="leads cell c-1 generation 3, not"):
        meeting.introduce(other)
    meeting.callers_end.close()
    with pytest.raises(NotYet, match="broke off"):
        admitted.result(LIMIT_S)


def test_a_rank_that_the_cell_does_not_have_is_refused(meeting: Meeting) -> None:
    admitted = meeting.leader_admits()
    with pytest.raises(NotYet, match="rank 2 is not 1 to 1"):
        meeting.introduce(follower(LEADER, rank=2))
    with pytest.raises(NotYet):
        admitted.result(LIMIT_S)


def test_who_comes_late_is_refused_for_good(meeting: Meeting) -> None:
    admitted = meeting.leader_admits(taken=lambda rank: f"too late: rank {rank} is in the cell already")
    with pytest.raises(Refused, match="too late: rank 1 is in the cell already"):
        meeting.introduce()
    with pytest.raises(NotYet, match="too late"):
        admitted.result(LIMIT_S)


def test_other_software_is_named_on_both_sides(meeting: Meeting) -> None:
    admitted = meeting.leader_admits()
    difference = r"rank 1 \(n-00000001\) differs from rank 0 \(n-00000000\): vllm is 0.31.0 instead of 0.32.0"
    with pytest.raises(Refused, match=difference):
        meeting.introduce(software={**SOFTWARE, "vllm": "0.31.0"})
    with pytest.raises(Refused, match=difference):
        admitted.result(LIMIT_S)


def test_a_stranger_cannot_refuse_in_the_leaders_name(meeting: Meeting) -> None:
    meeting.leaders_end.sendall(json.dumps({"cell": "c-1", "generation": 3, "nonce": "00"}).encode() + b"\n")
    meeting.leaders_end.sendall(json.dumps({"refused": "go away", "proof": "00"}).encode() + b"\n")
    with pytest.raises(NotYet, match="refused: go away"):
        meeting.introduce()


def test_a_join_cannot_be_played_back(meeting: Meeting) -> None:
    first_challenge = {"cell": "c-1", "generation": 3, "nonce": "11" * 16}
    meeting.leaders_end.sendall(json.dumps(first_challenge).encode() + b"\n")
    meeting.leaders_end.sendall(json.dumps({"proof": ""}).encode() + b"\n")
    with pytest.raises(NotYet):
        meeting.introduce()
    recorded = meeting.leaders_end.recv(65536)
    admitted = meeting.leader_admits()
    meeting.callers_end.sendall(recorded)
    with pytest.raises(NotYet, match="does not prove"):
        admitted.result(LIMIT_S)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n", b"[1]\n", b"\x80\x04.\n", b"x" * 40_000], ids=len)
def test_what_is_no_handshake_is_refused(meeting: Meeting, said: bytes) -> None:
    admitted = meeting.leader_admits()
    meeting.callers_end.sendall(said)
    with pytest.raises(NotYet, match=r"another protocol|a line longer than|is cell c-1|broke off"):
        admitted.result(LIMIT_S)
