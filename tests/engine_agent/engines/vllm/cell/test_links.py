"""Leader and followers over real connections: they meet, detect each other's failures, and name what ends the cell."""

import contextlib
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import Queue
from threading import Thread
from time import monotonic

import pytest

from engine_agent.engines.vllm.cell.follower_link import FollowerLink
from engine_agent.engines.vllm.cell.leader_link import LeaderLink
from engine_agent.engines.vllm.cell.member import CellEnded, Member
from tests.engine_agent.engines.between import between, old_tls
from tests.engine_agent.engines.vllm.cell.members import CERTIFICATE, LIMIT_S, SECRET, follower, leader
from tests.ports import free_port

pytestmark = pytest.mark.slow

SOFTWARE = {"vllm": "0.32.0"}


class Cell:
    """Both sides of a cell in this process. The end of a side is put into its queue instead of ending a process."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.leaders_end: Queue[str] = Queue()
        self.followers_end: Queue[tuple[str, bool]] = Queue()
        self.setups: Queue[bytes | CellEnded] = Queue()
        self.followers: dict[int, FollowerLink] = {}
        self.links: list[FollowerLink] = []
        self.leader = LeaderLink(member, SECRET, CERTIFICATE, SOFTWARE, self.leaders_end.put)

    def call(
        self, rank: int = 1, secret: bytes = SECRET, software: dict[str, str] = SOFTWARE, **changes: float
    ) -> None:
        member = replace(follower(self.member, rank), **changes)  # type: ignore[arg-type]
        link = FollowerLink(member, secret, software, lambda reason, failed: self.followers_end.put((reason, failed)))
        self.followers.setdefault(rank, link)
        self.links.append(link)
        Thread(target=self._connect, args=(link,), daemon=True).start()

    def form(self, **changes: float) -> None:
        """All followers join, with `changes` to the leader, and all start to watch."""
        for rank in range(1, self.member.size):
            self.call(rank, **changes)  # type: ignore[arg-type]
        self.leader.gather()
        self.leader.publish(b"setup")
        for _ in self.followers:
            assert self.setups.get(timeout=LIMIT_S) == b"setup"
        for link in self.followers.values():
            link.start()
        self.leader.start_watching()

    def _connect(self, link: FollowerLink) -> None:
        try:
            self.setups.put(link.connect(lambda _: None))
        except CellEnded as error:
            self.setups.put(error)

    def who_is_missing(self, refused: str) -> str:
        """Returns why the cell does not form, once the leader has checked all connections: on a busy machine, after its
        timeout."""
        ends_at = monotonic() + LIMIT_S
        while True:
            with pytest.raises(CellEnded) as ended:
                self.leader.gather()
            if refused in (reason := str(ended.value)):
                return reason
            assert monotonic() < ends_at, reason


Cells = Callable[..., Cell]


@pytest.fixture
def cells() -> Iterator[Cells]:
    made: list[Cell] = []

    def make(**limits: float) -> Cell:
        made.append(Cell(replace(leader(free_port()), **limits)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for cell in made:
        cell.leader.close("the test is over", failed=False)
        for link in cell.links:
            link.close()


def test_a_reply_reaches_its_call_and_a_late_one_none(cells: Cells) -> None:
    cell = cells()
    cell.form()
    cell.followers[1].reply(6, b"late")
    cell.followers[1].reply(7, b"seven")
    assert cell.leader.replies(7, LIMIT_S) == [b"seven"]


def test_replies_come_in_the_order_of_ranks(cells: Cells) -> None:
    cell = cells(followers=2)
    cell.form()
    cell.followers[2].reply(1, b"two")
    cell.followers[1].reply(1, b"one")
    assert cell.leader.replies(1, LIMIT_S) == [b"one", b"two"]


def test_a_reply_that_does_not_come_is_a_timeout(cells: Cells) -> None:
    cell = cells()
    cell.form()
    with pytest.raises(TimeoutError, match=r"rank 1 \(n-00000001\) did not reply to call 1"):
        cell.leader.replies(1, 0.01)
    cell.followers[1].reply(1, b"late")
    cell.followers[1].reply(2, b"two")
    assert cell.leader.replies(2, LIMIT_S) == [b"two"]
    assert cell.leader._followers[1].replies == {}


def test_the_output_of_a_step_waits_for_its_reader_while_other_calls_are_made(cells: Cells) -> None:
    """With pipeline stages several steps are under way."""
    cell = cells()
    cell.form()
    for number in (1, 2, 3):
        cell.followers[1].reply(number, b"%d" % number)
    assert cell.leader.replies(3, LIMIT_S) == [b"3"]
    assert [cell.leader.reply(1, number) for number in (1, 2)] == [b"1", b"2"]


def test_a_node_has_finished_what_all_its_workers_have(cells: Cells) -> None:
    cell = cells(hang_s=3.0)
    cell.form()
    cell.leader.step_called(1)
    cell.followers[1].done = 1
    cell.leader.finished = lambda _: 0
    cell.leader.step_finished(1)
    assert cell.leaders_end.get(timeout=LIMIT_S) == "rank 0 (n-00000000) did not finish step 1 within 3 s"


def test_a_failed_follower_says_why(cells: Cells) -> None:
    cell = cells()
    cell.form()
    cell.followers[1].fail("ValueError: no")
    assert cell.leaders_end.get(timeout=LIMIT_S) == "rank 1 (n-00000001) failed: ValueError: no"


def test_a_follower_that_is_told_to_stop_says_so(cells: Cells) -> None:
    cell = cells()
    cell.form()
    cell.followers[1].announce_leaving()
    cell.followers[1].close()
    assert cell.leaders_end.get(timeout=LIMIT_S) == "rank 1 (n-00000001) is stopping"


def test_a_follower_that_is_gone_is_named(cells: Cells) -> None:
    cell = cells()
    cell.form()
    cell.followers[1].close()
    assert cell.leaders_end.get(timeout=LIMIT_S).startswith("rank 1 (n-00000001) is gone: its connection ")


def test_followers_hear_why_the_leader_ends(cells: Cells) -> None:
    cell = cells()
    cell.form()
    cell.leader.close("told to", failed=False)
    assert cell.followers_end.get(timeout=LIMIT_S) == ("the leader ended the cell: told to", False)


def test_a_step_that_is_never_finished_ends_the_cell(cells: Cells) -> None:
    cell = cells(hang_s=3.0)
    cell.form()
    cell.leader.step_called(1)
    cell.leader.step_finished(1)
    assert cell.leaders_end.get(timeout=LIMIT_S) == "rank 1 (n-00000001) did not finish step 1 within 3 s"


def test_who_comes_late_ends_and_the_cell_does_not(cells: Cells) -> None:
    cell = cells()
    cell.form()
    cell.call(1)
    late = cell.setups.get(timeout=LIMIT_S)
    assert str(late) == "the leader refused: too late: rank 1 (n-00000001) is in the cell already"
    assert cell.leaders_end.empty()


def test_other_software_ends_both_with_the_same_words(cells: Cells) -> None:
    cell = cells()
    cell.call(software={"vllm": "0.31.0"})
    with pytest.raises(CellEnded, match=r"fingerprint mismatch: rank 1 .* vllm is 0.31.0 instead of 0.32.0") as ended:
        cell.leader.gather()
    assert str(cell.setups.get(timeout=LIMIT_S)) == f"the leader refused: {ended.value}"


def test_a_follower_that_never_comes_is_named_with_who_came_instead(cells: Cells) -> None:
    cell = cells(join_timeout_s=0.5)
    cell.call(secret=b"wrong", join_timeout_s=0.3)
    reason = cell.who_is_missing("127.0.0.1 was refused: ")
    assert re.match(r"no follower of rank 1 joined within 0.5 s; 127.0.0.1 was refused: .*secret", reason)
    assert "does not prove that it knows the secret of cell c-1, for 0.3 s" in str(cell.setups.get(timeout=LIMIT_S))


def test_a_leader_that_is_not_there_is_named() -> None:
    nowhere = leader(free_port(), join_timeout_s=0.1)
    link = FollowerLink(follower(nowhere), SECRET, SOFTWARE, lambda *_: None)
    with pytest.raises(CellEnded, match=r"no leader at 127\.0\.0\.1:\d+: Connection refused, for 0.1 s"):
        link.connect(lambda _: None)


def test_strangers_who_say_nothing_keep_nobody_out(cells: Cells) -> None:
    cell = cells()
    where = (cell.member.leader_address, cell.member.leader_port)
    with socket.create_connection(where), socket.create_connection(where):
        cell.form()


def test_calls_reach_every_follower_in_their_order(cells: Cells) -> None:
    cell = cells(followers=2)
    cell.form()
    long = b"x" * 3_000_000
    assert [cell.leader.call(call) for call in (b"one", long, b"")] == [1, 2, 3]
    for link in cell.followers.values():
        assert [link.next_call() for _ in range(3)] == [(1, b"one"), (2, long), (3, b"")]


def test_a_follower_that_takes_nothing_any_more_hangs_and_holds_up_nobody(cells: Cells) -> None:
    """The leader's calling thread waits for it; the watching thread does not, nor does the farewell to other
    followers."""
    cell = cells(followers=2, hang_s=3.0)
    cell.form(hang_s=LIMIT_S)  # otherwise the stopped follower may be the first to report: it receives nothing
    stopped = cell.followers[1]._connected()._connection
    with stopped._held:  # it reads nothing and beats no more
        calling = Thread(target=cell.leader.call, args=(b"x" * 50_000_000,), daemon=True)
        calling.start()
        assert cell.leaders_end.get(timeout=LIMIT_S) == "rank 1 (n-00000001) hangs: no heartbeat for 3 s"
        assert calling.is_alive()
        cell.leader.close("rank 1 hangs", failed=True)
        assert cell.followers_end.get(timeout=LIMIT_S) == ("the leader ended the cell: rank 1 hangs", True)


def test_who_stands_between_with_a_certificate_of_their_own_is_refused(cells: Cells) -> None:
    cell = cells(join_timeout_s=0.1)
    with between(cell.member.leader_port, with_a_certificate=True) as stranger:
        cell.call(leader_port=stranger.port, join_timeout_s=0.3)
        with pytest.raises(CellEnded, match="no follower of rank 1 joined"):
            cell.leader.gather()
        assert "does not prove that it knows the secret of cell c-1, for 0.3 s" in str(cell.setups.get(timeout=LIMIT_S))
    assert b'"cell": "c-1"' in stranger.seen  # it reads the challenge, which is not secret, and gets no further


def test_who_listens_on_the_wire_reads_nothing_and_cannot_play_it_back(cells: Cells) -> None:
    cell = cells()
    with between(cell.member.leader_port, with_a_certificate=False) as stranger:
        cell.call(leader_port=stranger.port)
        cell.leader.gather()
        cell.leader.publish(b"the whole configuration")
        assert cell.setups.get(timeout=LIMIT_S) == b"the whole configuration"
        assert len(stranger.seen) > 1000
        assert not any(word in stranger.seen for word in (b"c-1", b"proof", b"n-0000000", b"configuration"))
        with socket.create_connection((cell.member.leader_address, cell.member.leader_port)) as again:
            again.sendall(stranger.seen)
            with contextlib.suppress(ConnectionResetError):
                while again.recv(65536):
                    pass  # until the leader has had enough of it
    assert cell.leaders_end.empty()


@pytest.mark.parametrize("sent", [b'{"cell": "c-1"}\n', b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01"], ids=repr)
def test_a_plain_or_half_opened_connection_keeps_nobody_out(cells: Cells, sent: bytes) -> None:
    cell = cells()
    with socket.create_connection((cell.member.leader_address, cell.member.leader_port)) as stranger:
        stranger.sendall(sent)
        cell.form()
    assert cell.leaders_end.empty()


def test_a_plain_connection_is_refused_in_words(cells: Cells) -> None:
    cell = cells(join_timeout_s=0.1)
    with socket.create_connection((cell.member.leader_address, cell.member.leader_port)) as stranger:
        stranger.sendall(b'{"cell": "c-1", "rank": 1}\n')
        assert cell.who_is_missing("127.0.0.1 was refused: the server does not speak TLS 1.3")


def test_older_tls_is_refused(cells: Cells) -> None:
    cell = cells()
    cell.form()
    with (
        socket.create_connection((cell.member.leader_address, cell.member.leader_port)) as stranger,
        pytest.raises(ssl.SSLError),
    ):
        old_tls().wrap_socket(stranger)


def test_a_leader_that_speaks_no_tls_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as plain:
        nowhere = leader(plain.getsockname()[1], join_timeout_s=0.0)
        answering = Thread(target=_answer_in_plain, args=(plain,))
        answering.start()
        link = FollowerLink(follower(nowhere), SECRET, SOFTWARE, lambda *_: None)
        with pytest.raises(CellEnded, match=r"does not speak TLS 1\.3 \(wrong version number\)"):
            link.connect(lambda _: None)
        answering.join()


def _answer_in_plain(server: socket.socket) -> None:
    caller, _ = server.accept()
    with caller:
        caller.sendall(b'{"cell": "c-1", "generation": 3, "nonce": "00"}\n')
        caller.recv(65536)


def test_a_taken_port_is_named() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(CellEnded, match=r"cannot listen for followers on 127\.0\.0\.1:"),
    ):
        LeaderLink(leader(taken.getsockname()[1]), SECRET, CERTIFICATE, SOFTWARE, lambda _: None)
