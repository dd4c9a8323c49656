"""Run by the engine's Python, which has ZeroMQ: a publisher like vLLM's, of which a reader misses the first batches,
one in the middle, and one permanently. Prints the results, one line each."""

import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Condition

import msgspec
import zmq

from engine_agent.engines.vllm.middleware import END_OF_REPLAY, EVENTS_SOCKET, REPLAY_SOCKET, KvEventReader
from engine_agent.protocol.proxy_messages import BlocksStored

LIMIT_S = 30.0
told: list[str] = []
heard = Condition()
"""Called in the reader's thread."""


class Publisher:
    """The two sockets of `ZmqEventPublisher`, and its buffer."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", folder: Path) -> None:
        self._events, self._replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self._events.bind(f"ipc://{folder / EVENTS_SOCKET}")
        self._replay.bind(f"ipc://{folder / REPLAY_SOCKET}")
        self.kept: list[tuple[bytes, bytes]] = []

    def publish(self, number: int, *, arrives: bool = True) -> None:
        event = {
            "type": "BlockStored",
            "block_hashes": [bytes([number]) * 32],
            "parent_block_hash": None,
            "token_ids": [1],
            "block_size": 16,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "session_id": f"e-{number}",
        }
        self.kept.append((number.to_bytes(8), msgspec.msgpack.encode([0.0, [event], 0])))
        if arrives:
            self._events.send_multipart((b"", *self.kept[-1]))

    def is_asked(self, within_ms: int) -> bool:
        return bool(self._replay.poll(within_ms))

    def close(self) -> None:
        for socket in (self._events, self._replay):
            socket.close(linger=0)

    def serve_replay(self) -> None:
        client, _, first = self._replay.recv_multipart()
        for number, payload in self.kept:
            if number >= first:
                self._replay.send_multipart((client, b"", b"", number, payload))
        self._replay.send_multipart((client, b"", b"", END_OF_REPLAY, b""))


def until(condition: Callable[[], bool]) -> None:
    with heard:
        if not heard.wait_for(condition, LIMIT_S):
            sys.exit(f"told only {told}")


def tell(words: Iterable[str]) -> None:
    with heard:
        told.extend(words)
        heard.notify_all()


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def main() -> None:
    with tempfile.TemporaryDirectory() as name, zmq.Context() as context:
        publisher = Publisher(context, Path(name))
        publisher.publish(0)
        reader = KvEventReader(
            Path(name),
            lambda events, _: tell(each.exchange for each in events if isinstance(each, BlocksStored)),
            lambda: tell(["lost"]),
        )
        reader.start()
        numbers = iter(range(1, 256))
        publisher.publish(next(numbers))
        while not publisher.is_asked(50):  # there is no signal that a subscription has arrived
            publisher.publish(next(numbers))
        publisher.serve_replay()
        until(lambda: told == [f"e-{at}" for at in range(len(publisher.kept))])
        say("the first ones came after all")
        publisher.publish(next(numbers), arrives=False)
        publisher.publish(next(numbers))
        publisher.serve_replay()
        until(lambda: told == [f"e-{at}" for at in range(len(publisher.kept))])
        say("so did one in the middle")
        publisher.publish(next(numbers), arrives=False)
        publisher.kept.pop()
        publisher.publish(last := next(numbers))
        publisher.serve_replay()
        until(lambda: told[-2:] == ["lost", f"e-{last}"])
        say("one that is gone empties the list")
        reader.stop()
        publisher.close()


if __name__ == "__main__":
    main()
