"""What members of a cell say to each other over the rendezvous port: one JSON frame a line, and how a frame is proved.

Both sides prove that they hold the cell's secret for the same generation: each signs the other's fresh nonce together
with everything that it claims, so nothing can be replayed to another cell, generation, rank or connection. The secret
never travels. No socket is touched here.
"""

import asyncio
import hmac
import secrets

import msgspec
from msgspec import Struct, field

from engine_agent.engines.sim.faults import Effects
from engine_agent.engines.sim.settings import HEARTBEAT_S, SILENT_BEATS
from engine_agent.protocol.fingerprint import fingerprint_digest
from engine_agent.protocol.messages import StepTimes

MAX_FRAME_BYTES = 16 * 1024
"""The longest is a join with the largest fingerprint, 11 KiB."""


class BadFrame(ValueError):
    """A line that is no frame of this protocol."""


class Challenge(Struct, frozen=True, tag="challenge"):
    """First word of the leader."""

    cell: str
    generation: int
    nonce: str


class Join(Struct, frozen=True, tag="join"):
    """The follower's answer: who it is and what it runs, proved, and a nonce for the leader to prove itself."""

    node: str
    cell: str
    generation: int
    rank: int
    nonce: str
    fingerprint: dict[str, str] = field(default_factory=dict)
    proof: str = ""


class Welcome(Struct, frozen=True, tag="welcome"):
    """The leader took the follower in, and proves itself."""

    proof: str


class Refusal(Struct, frozen=True, tag="refusal"):
    """The leader did not take the follower in. With its proof it is the leader's last word; without, ask again."""

    reason: str
    proof: str = ""


class Beat(Struct, frozen=True, tag="beat"):
    """I live; these are the effects of my faults, and from a leader what the cell computed. The next one says
    everything again."""

    effects: Effects = Effects()
    work: StepTimes = StepTimes()


class Farewell(Struct, frozen=True, tag="farewell"):
    """I am about to go: stopped on purpose (`failed` False) or because the cell failed."""

    reason: str
    failed: bool


Frame = Challenge | Join | Welcome | Refusal | Beat | Farewell

_encoder = msgspec.json.Encoder()
_decoder: "msgspec.json.Decoder[Frame]" = msgspec.json.Decoder(Frame)


def encode(frame: Frame) -> bytes:
    """One frame as a line."""
    return _encoder.encode(frame) + b"\n"


def new_nonce() -> str:
    """A fresh 128-bit challenge."""
    return secrets.token_hex(16)


def join_proof(secret: str, challenge: Challenge, join: Join) -> str:
    """The follower's proof, over the leader's challenge and all that the follower claims but the proof itself."""
    runs = fingerprint_digest(join.fingerprint)
    claims = (join.node, join.cell, str(join.generation), str(join.rank), join.nonce, runs)
    return _proof(secret, "follower", challenge, *claims)


def welcome_proof(secret: str, challenge: Challenge, join: Join) -> str:
    """The leader's proof, over its challenge and the follower's nonce."""
    return _proof(secret, "leader", challenge, join.nonce)


def refusal_proof(secret: str, challenge: Challenge, join: Join, reason: str) -> str:
    """The leader's proof that it refuses this join for good, over the follower's nonce and the reason."""
    return _proof(secret, "refusal", challenge, join.nonce, reason)


def is_proof(given: str, expected: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given.encode(), expected.encode())


def _proof(secret: str, who: str, challenge: Challenge, *claims: str) -> str:
    text = msgspec.json.encode([who, challenge.cell, challenge.generation, challenge.nonce, *claims])
    return hmac.new(secret.encode(), text, "sha256").hexdigest()


async def read_frame(reader: asyncio.StreamReader, timeout_s: float) -> Frame:
    """The next frame of a connection.

    Raises:
        EOFError: the other side closed the connection, or its process is gone.
        TimeoutError: nothing came for `timeout_s` seconds.
        BadFrame: not a frame.
    """
    async with asyncio.timeout(timeout_s):
        try:
            line = await reader.readline()
        except ValueError as error:
            raise BadFrame(f"a line longer than {MAX_FRAME_BYTES} bytes") from error
        except OSError as error:
            raise EOFError(str(error)) from error
    if not line.endswith(b"\n"):
        raise EOFError("closed")
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadFrame(str(error)) from error


async def read_living(reader: asyncio.StreamReader) -> Frame:
    """The next frame of a member that beats.

    It waits for one heartbeat at a time: after a stall of this process itself, of whatever length, the frames that came
    meanwhile are still read before anyone is called silent.

    Raises:
        EOFError, BadFrame: see `read_frame`.
        TimeoutError: `SILENT_BEATS` heartbeats in turn did not come.
    """
    for _ in range(SILENT_BEATS - 1):
        try:
            return await read_frame(reader, HEARTBEAT_S)
        except TimeoutError:
            continue
    return await read_frame(reader, HEARTBEAT_S)
