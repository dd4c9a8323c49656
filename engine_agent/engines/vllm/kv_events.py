"""Reads vLLM's KV events: which blocks its prefix cache has, from the engine's core, over sockets in its folder.

vLLM (0.32, `distributed/kv_events.py`) publishes batches with sequence numbers on a PUB socket and keeps the last
10,000 for a ROUTER socket, which replays what a reader missed. Events name the tokens of blocks, so these sockets are
files that the engine's account alone may open, and no token goes any further than this module: it passes hashes on.
What was missed for good cannot be asked for, so then everything is forgotten, and learnt anew as it is stored.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from engine_agent.protocol.proxy_messages import BlockEvent, BlocksRemoved, BlocksStored, CacheCleared

FOLDER_VARIABLE: Final = "SWITCHYARD_KV_EVENTS"
"""How the launcher tells the server in which folder the sockets are."""
EVENTS_SOCKET, REPLAY_SOCKET = "kv-events", "kv-replay"
POLL_MS = 1000
REPLAY_LIMIT_MS = 5000
"""Its thread looks for questions ten times a second, and before each batch."""
NUMBER_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(NUMBER_BYTES, signed=True)
HASH_BYTES = 8
"""Of vLLM's 32: enough to tell the blocks of one cache apart."""
FIRST_GROUP = 0
"""Of a model with several kinds of attention: all must have a prefix for it to be found, and the first is told."""

_Hash = bytes | int


class _Stored(msgspec.Struct, tag="BlockStored"):
    """What of it is of use; the tokens are passed over unread."""

    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    block_size: int
    medium: str | None = None
    group_idx: int | None = None
    session_id: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_Stored | _Removed | _Cleared]


def config_of(folder: Path) -> dict[str, Any]:
    """The value of `--kv-events-config`."""
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{folder / EVENTS_SOCKET}",
        "replay_endpoint": f"ipc://{folder / REPLAY_SOCKET}",
    }


class KvEventDecoder:
    """Batches of vLLM's as block events. A block that lies in several places, on the device and in the host's memory,
    is gone when it is in none."""

    def __init__(self) -> None:
        self._batches = msgspec.msgpack.Decoder(_Batch)
        self._places: dict[int, set[str]] = {}
        self.block_tokens = 0

    def decode(self, payload: bytes) -> tuple[BlockEvent, ...]:
        """Raises:
        msgspec.DecodeError: it is no batch of this vLLM.
        """
        events = (event for raw in self._batches.decode(payload).events for event in self._translate(raw))
        return tuple(events)

    def _translate(self, raw: _Stored | _Removed | _Cleared) -> Iterator[BlockEvent]:
        if isinstance(raw, _Cleared):
            self._places.clear()
            yield CacheCleared()
        elif (raw.group_idx or FIRST_GROUP) != FIRST_GROUP:
            return
        elif isinstance(raw, _Stored):
            self.block_tokens = raw.block_size
            blocks = tuple(map(_short, raw.block_hashes))
            for block in blocks:
                self._places.setdefault(block, set()).add(raw.medium or "")
            parent = 0 if raw.parent_block_hash is None else _short(raw.parent_block_hash)
            yield BlocksStored(parent, blocks, raw.session_id or "")
        elif gone := tuple(self._gone(map(_short, raw.block_hashes), raw.medium or "")):
            yield BlocksRemoved(gone)

    def _gone(self, blocks: Iterable[int], place: str) -> Iterator[int]:
        for block in blocks:
            places = self._places.get(block)
            if places is None:
                continue
            places.discard(place)
            if not places:
                del self._places[block]
                yield block

    def forget(self) -> None:
        self._places.clear()


def _short(block: _Hash) -> int:
    """63 bits of it, never 0: that stands for no block."""
    number = block if isinstance(block, int) else int.from_bytes(block[:HASH_BYTES])
    return (number >> 1) | 1 << 62


class KvEventReader:
    """A thread of the API server that reads the core's events. `deliver` gets them in order, with the tokens in a
    block; `lost` is called when some were missed for good. Both are called in that thread."""

    def __init__(
        self, folder: Path, deliver: Callable[[tuple[BlockEvent, ...], int], None], lost: Callable[[], None]
    ) -> None:
        self._folder = folder
        self._deliver, self._lost = deliver, lost
        self._decoder = KvEventDecoder()
        self._expected = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End within a second."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        import zmq

        with zmq.Context() as context, context.socket(zmq.SUB) as events:
            events.setsockopt(zmq.RCVHWM, 0)
            events.setsockopt(zmq.SUBSCRIBE, b"")
            events.connect(f"ipc://{self._folder / EVENTS_SOCKET}")
            while not self._stopped.is_set():
                if events.poll(POLL_MS):
                    self._receive(context, *events.recv_multipart()[-2:])

    def _receive(self, context: Any, number: bytes, payload: bytes) -> None:
        at = int.from_bytes(number)
        if at < self._expected:
            return
        if at > self._expected:
            self._replay(context, at)
        self._take(at, payload)

    def _take(self, at: int, payload: bytes) -> None:
        try:
            events = self._decoder.decode(payload)
        except msgspec.DecodeError:
            self._forget()
        else:
            self._deliver(events, self._decoder.block_tokens)
        self._expected = at + 1

    def _replay(self, context: Any, before: int) -> None:
        """Ask for what was missed before this number: the first batches of a start, or what a full queue dropped."""
        import zmq

        with context.socket(zmq.DEALER) as replay:
            replay.setsockopt(zmq.LINGER, 0)
            replay.connect(f"ipc://{self._folder / REPLAY_SOCKET}")
            replay.send_multipart((b"", self._expected.to_bytes(NUMBER_BYTES)))
            while self._expected < before and not self._stopped.is_set() and replay.poll(REPLAY_LIMIT_MS):
                number, payload = replay.recv_multipart()[-2:]
                at = int.from_bytes(number)
                if number == END_OF_REPLAY or at >= before:
                    break
                if at > self._expected:
                    self._forget()
                if at >= self._expected:
                    self._take(at, payload)
        if self._expected < before:
            self._forget()

    def _forget(self) -> None:
        self._decoder.forget()
        self._lost()
