"""How the members of a cell find each other, and which connections and software they refuse."""

import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine_agent.engines.between import between, old_tls
from tests.engine_agent.engines.sim.cells import CHAT, DEADLINE_S, SECRET, Cell, until

pytestmark = pytest.mark.processes


@pytest.fixture
def cell(tmp_path: Path) -> Iterator[Cell]:
    cell = Cell(tmp_path, followers=1)
    yield cell
    cell.stop()


def test_a_leader_serves_only_once_its_followers_are_there(cell: Cell) -> None:
    leader = cell.start(0)
    until(lambda: leader.health() == (503, "waiting for followers: 0 of 1 connected"), leader.output)
    refused = leader.chat(CHAT)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_not_serving")

    follower = cell.start(1)

    until(lambda: leader.health()[0] == 200 and follower.health()[0] == 200, leader.output)
    assert "ready: leader with 1 follower" in leader.output()
    assert "ready: follower rank 1" in follower.output()


def test_a_follower_waits_for_a_leader_that_comes_later(cell: Cell) -> None:
    follower = cell.start(1)
    until(lambda: "Connection refused" in follower.health()[1] and follower.health()[0] == 503, follower.output)

    cell.start(0)

    until(lambda: follower.health()[0] == 200, follower.output)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [({"secret": "another"}, "does not prove that it knows the secret"), ({"generation": "2"}, "generation 2")],
)
def test_a_member_of_another_cell_or_generation_is_not_let_in(cell: Cell, wrong: dict[str, Any], why: str) -> None:
    leader = cell.start(0)
    until(lambda: leader.health()[0] == 503, leader.output)

    stranger = cell.start(1, "--rendezvous-timeout-s", "2", **wrong)

    assert stranger.exit_status() == 1
    assert why in stranger.output()
    assert leader.health() == (503, "waiting for followers: 0 of 1 connected")


def test_who_stands_between_with_a_certificate_of_their_own_is_refused(cell: Cell) -> None:
    leader = cell.start(0)
    until(lambda: leader.health()[0] == 503, leader.output)

    with between(cell.rendezvous_port, with_a_certificate=True) as stranger:
        follower = cell.start(1, "--leader", f"127.0.0.1:{stranger.port}", "--rendezvous-timeout-s", "3")

        assert follower.exit_status() == 1
    assert "does not prove that it knows the secret" in follower.output()
    assert b'"cell": "c-1"' in stranger.seen  # it reads the challenge, which is not secret, and gets no further
    assert leader.health() == (503, "waiting for followers: 0 of 1 connected")


def test_who_listens_on_the_wire_reads_nothing_and_cannot_play_it_back(cell: Cell) -> None:
    leader = cell.start(0)
    with between(cell.rendezvous_port, with_a_certificate=False) as stranger:
        follower = cell.start(1, "--leader", f"127.0.0.1:{stranger.port}")
        until(lambda: leader.health()[0] == 200 and follower.health()[0] == 200, leader.output)
        seen = bytes(stranger.seen)
        assert len(seen) > 1000
        assert not any(word in seen for word in (b"c-1", b"proof", b"beat", follower.node_id.encode()))

        with socket.create_connection(("127.0.0.1", cell.rendezvous_port)) as again:
            again.sendall(seen)
            assert_hung_up(again)
        assert leader.health()[0] == 200


@pytest.mark.parametrize(
    "sent", [b"", b"\x16\x03\x01", b'{"cell": "c-1", "rank": 1}\n'], ids=["silent", "half", "plain"]
)
def test_who_speaks_no_tls_is_hung_up_on_and_keeps_nobody_out(cell: Cell, sent: bytes) -> None:
    leader = cell.start(0)
    until(lambda: leader.health()[0] == 503, leader.output)

    with socket.create_connection(("127.0.0.1", cell.rendezvous_port)) as stranger:
        stranger.sendall(sent)
        cell.start(1)
        until(lambda: leader.health()[0] == 200, leader.output)
        assert_hung_up(stranger)


def test_older_tls_is_refused(cell: Cell) -> None:
    leader = cell.start(0)
    until(lambda: leader.health()[0] == 503, leader.output)

    with (
        socket.create_connection(("127.0.0.1", cell.rendezvous_port)) as stranger,
        pytest.raises(ssl.SSLError),
    ):
        old_tls().wrap_socket(stranger)


def test_a_leader_that_speaks_no_tls_is_named(cell: Cell) -> None:
    with socket.create_server(("127.0.0.1", cell.rendezvous_port)) as plain:
        follower = cell.start(1, "--rendezvous-timeout-s", "1")
        caller, _ = plain.accept()
        with caller:
            caller.sendall(b'{"cell": "c-1", "generation": 3, "nonce": "00"}\n')

            assert follower.exit_status() == 1
    assert "does not speak TLS 1.3" in follower.output()


def assert_hung_up(stranger: socket.socket) -> None:
    """The leader closes the connection; an alert may precede."""
    stranger.settimeout(DEADLINE_S)
    with contextlib.suppress(ConnectionResetError):
        while stranger.recv(65536):
            pass


def test_a_leader_whose_followers_do_not_come_gives_up(cell: Cell) -> None:
    leader = cell.start(0, "--rendezvous-timeout-s", "0.3")

    assert leader.exit_status() == 1
    assert "1 of 1 followers did not join within 0.3 s" in leader.output()


def test_a_taken_port_ends_with_one_sentence(cell: Cell) -> None:
    with socket.create_server(("127.0.0.1", cell.rendezvous_port)):
        leader = cell.start(0)

        assert leader.exit_status() == 1
    assert f"cannot start: cannot listen on 127.0.0.1:{cell.rendezvous_port}" in leader.output()
    assert "Traceback" not in leader.output()


STACK = {"kernel": "6.8", "engine": "sim 1", "flags": "0123456789ab"}


@pytest.fixture
def test_ranks_that_run_the_same_form_a_cell(cell: Cell) -> None:
    leader, follower = cell.start(0, fingerprint=STACK), cell.start(1, fingerprint=STACK)
    until(lambda: leader.health()[0] == 200 and follower.health()[0] == 200, leader.output)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({**STACK, "kernel": "6.9"}, "kernel is 6.9 instead of 6.8"),
        ({"kernel": "6.8", "engine": "sim 1"}, "flags is absent instead of 0123456789ab"),
        ({**STACK, "driver": "2"}, "driver is 2 instead of absent"),
    ],
)
def test_a_rank_that_runs_something_else_ends_the_cell_at_once_and_is_named(
    cell: Cell, other: dict[str, str], expected: str
) -> None:
    reason = f"fingerprint mismatch: rank 1 ({cell.node_id(1)}) differs from rank 0 ({cell.node_id(0)}): {expected}"
    leader = cell.start(0, fingerprint=STACK)
    until(lambda: leader.health()[0] == 503, leader.output)

    follower = cell.start(1, fingerprint=other)

    assert (leader.exit_status(), follower.exit_status()) == (1, 1)
    for member in (leader, follower):
        assert member.output().splitlines()[-1].endswith(f"exit with status 1: {reason}")


def test_who_does_not_know_the_secret_cannot_end_a_cell_with_another_fingerprint(cell: Cell) -> None:
    leader = cell.start(0, fingerprint=STACK)
    until(lambda: leader.health()[0] == 503, leader.output)
    stranger = cell.start(1, "--rendezvous-timeout-s", "2", secret=f"not {SECRET}", fingerprint={"kernel": "0"})
    assert stranger.exit_status() == 1
    assert leader.health() == (503, "waiting for followers: 0 of 1 connected")
