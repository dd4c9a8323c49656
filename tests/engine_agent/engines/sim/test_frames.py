"""Who may join a cell: proofs of the secret."""

import asyncio

import pytest
from msgspec import structs

from engine_agent.engines.sim.frames import (
    MAX_FRAME_BYTES,
    BadFrame,
    Beat,
    Challenge,
    Join,
    encode,
    is_proof,
    join_proof,
    read_frame,
    welcome_proof,
)
from engine_agent.protocol.fingerprint import FINGERPRINT_MAX_FIELDS, FINGERPRINT_MAX_NAME, FINGERPRINT_MAX_VALUE

CHALLENGE = Challenge(cell="c-1", generation=3, nonce="aa")
JOIN = Join(node="n-00000001", cell="c-1", generation=3, rank=1, nonce="bb")
PROOF = join_proof("secret", CHALLENGE, JOIN)


def test_the_secret_proves_a_join() -> None:
    assert is_proof(PROOF, join_proof("secret", CHALLENGE, JOIN))


@pytest.mark.parametrize(
    "other",
    [
        join_proof("another", CHALLENGE, JOIN),
        join_proof("secret", structs.replace(CHALLENGE, nonce="ab"), JOIN),
        join_proof("secret", structs.replace(CHALLENGE, generation=4), JOIN),
        join_proof("secret", CHALLENGE, structs.replace(JOIN, rank=2)),
        join_proof("secret", CHALLENGE, structs.replace(JOIN, node="n-00000002")),
        join_proof("secret", CHALLENGE, structs.replace(JOIN, fingerprint={"kernel": "6"})),
        welcome_proof("secret", CHALLENGE, JOIN),
    ],
    ids=["secret", "nonce", "generation", "rank", "node", "fingerprint", "leader's own proof sent back"],
)
def test_a_proof_is_good_for_nothing_else(other: str) -> None:
    assert not is_proof(PROOF, other)


def test_the_largest_fingerprint_fits_into_a_join() -> None:
    fields = {f"{at:0{FINGERPRINT_MAX_NAME}d}": "x" * FINGERPRINT_MAX_VALUE for at in range(FINGERPRINT_MAX_FIELDS)}
    join = structs.replace(JOIN, fingerprint=fields, proof=PROOF)
    assert read(encode(join)) == join


def read(line: bytes) -> object:
    async def reading() -> object:
        reader = asyncio.StreamReader(limit=MAX_FRAME_BYTES)
        reader.feed_data(line)
        reader.feed_eof()
        return await read_frame(reader, timeout_s=1.0)

    return asyncio.run(reading())


def test_a_frame_is_read_back() -> None:
    assert read(encode(Beat())) == Beat()


@pytest.mark.parametrize("line", [b"hello\n", b'{"type":"x"}\n', b"\xff\n", b"x" * (MAX_FRAME_BYTES + 1) + b"\n"])
def test_a_line_that_is_no_frame_is_refused(line: bytes) -> None:
    with pytest.raises(BadFrame):
        read(line)


@pytest.mark.parametrize("line", [b"", b'{"type":"beat"}'])
def test_a_closed_connection_is_an_end_and_no_frame(line: bytes) -> None:
    with pytest.raises(EOFError):
        read(line)
