"""The connections between a cell's ranks: whole messages in order, strangers out, and a sentence where one is due."""

import hashlib
import socket
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Queue

import pytest

from engine_agent.engines.vllm.cell.mesh import FRAME_LIMIT_BYTES, Connection, OutOfStep, meet

LIMIT_S = 60.0


def proof(mine: int, theirs: int) -> bytes:
    return hashlib.sha256(f"secret {mine} {theirs}".encode()).digest()


class Board:
    """Where ranks say where they listen."""

    def __init__(self, size: int) -> None:
        self._places: list[Queue[str]] = [Queue() for _ in range(size)]

    def publish(self, rank: int, place: str) -> None:
        self._places[rank].put(place)

    def where_is(self, rank: int) -> str:
        place = self._places[rank].get(timeout=LIMIT_S)
        self._places[rank].put(place)
        return place


def join(rank: int, size: int, board: Board, within_s: float = LIMIT_S) -> Mapping[int, Connection]:
    return meet(
        rank=rank,
        size=size,
        address="127.0.0.1",
        proof=proof,
        publish=board.publish,
        where_is=board.where_is,
        within_s=within_s,
    )


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> Iterator[list[Mapping[int, Connection]]]:
    size: int = request.param
    board = Board(size)
    with ThreadPoolExecutor(size) as ranks:
        met = list(ranks.map(lambda rank: join(rank, size, board), range(size)))
    yield met
    for connections in met:
        for connection in connections.values():
            connection.socket.close()


@pytest.mark.parametrize("mesh", [2, 4], indirect=True)
def test_every_rank_gets_what_every_other_one_sends_though_all_send_first(
    mesh: list[Mapping[int, Connection]],
) -> None:
    def exchange(rank: int) -> list[set[bytes]]:
        seen = []
        for turn in range(20):
            content = bytes([rank, turn]) * (FRAME_LIMIT_BYTES // 2)
            for connection in mesh[rank].values():
                connection.send(memoryview(content))
            buffers = {peer: bytearray(len(content)) for peer in mesh[rank]}
            for peer, buffer in buffers.items():
                mesh[rank][peer].receive_into(memoryview(buffer))
            seen.append({bytes(buffer[:2]) for buffer in buffers.values()})
            assert all(bytes(buffer) == bytes([peer, turn]) * (len(buffer) // 2) for peer, buffer in buffers.items())
        return seen

    with ThreadPoolExecutor(len(mesh)) as ranks:
        for rank, seen in enumerate(ranks.map(exchange, range(len(mesh)))):
            others = set(range(len(mesh))) - {rank}
            assert seen == [{bytes([other, turn]) for other in others} for turn in range(20)]


@pytest.mark.parametrize("mesh", [2], indirect=True)
def test_a_long_message_in_one_direction_arrives_whole(mesh: list[Mapping[int, Connection]]) -> None:
    content = bytes(range(256)) * 20_000
    with ThreadPoolExecutor(1) as other:
        sent = other.submit(mesh[1][0].send, memoryview(content))
        buffer = bytearray(len(content))
        mesh[0][1].receive_into(memoryview(buffer))
        sent.result(LIMIT_S)
    assert bytes(buffer) == content


@pytest.mark.parametrize("mesh", [2], indirect=True)
def test_a_message_of_another_length_or_number_ends_with_a_sentence(mesh: list[Mapping[int, Connection]]) -> None:
    mesh[1][0].send(memoryview(b"1234"))
    with pytest.raises(OutOfStep, match="rank 1 sent message 1 of 4 bytes where 1 of 8 bytes was due"):
        mesh[0][1].receive_into(memoryview(bytearray(8)))
    mesh[1][0].sent += 1
    mesh[1][0].send(memoryview(b"5678"))
    with pytest.raises(OutOfStep, match="sent message 3 of 4 bytes where 2 of 4 bytes was due"):
        mesh[0][1].receive_into(memoryview(bytearray(4)))


@pytest.mark.parametrize("mesh", [2], indirect=True)
def test_a_rank_that_ends_is_named(mesh: list[Mapping[int, Connection]]) -> None:
    mesh[1][0].socket.close()
    with pytest.raises(OutOfStep, match="rank 1"):
        mesh[0][1].receive_into(memoryview(bytearray(4)))


def test_a_stranger_is_closed_and_the_rank_still_comes() -> None:
    board = Board(2)
    with ThreadPoolExecutor(2) as ranks:
        lower = ranks.submit(join, 0, 2, board)
        host, _, port = board.where_is(0).rpartition(":")
        for claimed in (struct.pack("<I", 1) + bytes(32), struct.pack("<I", 7) + proof(7, 0), b"\0"):
            with socket.create_connection((host, int(port)), timeout=LIMIT_S) as stranger:
                stranger.sendall(claimed)
                if len(claimed) == 1:
                    stranger.shutdown(socket.SHUT_WR)
                with suppress(ConnectionResetError):
                    assert stranger.recv(64) == b""
        higher = ranks.submit(join, 1, 2, board)
        met = [lower.result(LIMIT_S), higher.result(LIMIT_S)]
    assert [list(each) for each in met] == [[1], [0]]
    for connections in met:
        for connection in connections.values():
            connection.socket.close()


def test_who_answers_in_a_ranks_place_is_refused() -> None:
    board = Board(2)
    with socket.create_server(("127.0.0.1", 0)) as impostor, ThreadPoolExecutor(1) as ranks:
        board.publish(0, f"127.0.0.1:{impostor.getsockname()[1]}")
        higher = ranks.submit(join, 1, 2, board)
        connected, _ = impostor.accept()
        with connected:
            connected.sendall(bytes(32))
            with pytest.raises(OutOfStep, match="does not prove that it is rank 0"):
                higher.result(LIMIT_S)


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(OutOfStep, match=r"ranks \[1, 2\] did not connect"):
        join(0, 3, Board(3), within_s=0.0)
