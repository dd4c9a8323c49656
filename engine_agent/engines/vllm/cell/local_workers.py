"""The second and further workers of a node: one process for each device. The node's first worker runs in the process
that owns them, the leader's core or the follower, and makes the same calls.

The owner passes each call on as the bytes that it received or sends, so a step is pickled once for a whole cell. Calls
and replies take a pipe each, not /dev/shm, which containers often limit to 64 MiB. Imports no vLLM."""

import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from threading import Condition, Thread
from time import sleep
from typing import Any

from engine_agent.engines.vllm.cell.leader_link import PROGRESS
from engine_agent.engines.vllm.cell.member import STOP_SIGNALS
from engine_agent.engines.vllm.core_process import exit_with_parent

CAUSE_FIRST_S = 0.5
"""A collective fails before the news of another worker's death arrives, and the cause must win; measured: < 0.05 s."""
_EXIT_S = 5.0
"""For a process that has closed its pipe to exit."""


class _Kind(IntEnum):
    """Of a message to the owner: all but `FAILED` finish a call."""

    DONE = 1
    REPLY = 2
    OUTPUT = 3
    """Of a step."""
    FAILED = 4


Work = Callable[[int, "OwnerLink"], None]
"""What a local worker does until its cell ends: its place on the node, and its link to the owner."""


def parts_of(cores: Iterable[int], count: int) -> list[frozenset[int]]:
    """Returns neighbouring cores for each of so many workers; empty if they cannot have one each."""
    ordered = sorted(cores)
    ends = [len(ordered) * part // count for part in range(count + 1)]
    return [frozenset(ordered[begin:end]) for begin, end in pairwise(ends)] if len(ordered) >= count > 1 else []


class OwnerLink:
    """A local worker's side."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def receive(self) -> bytes:
        """Waits for a message. Raises EOFError if the owner is gone or needs this worker no more."""
        return self._connection.recv_bytes()

    def next_call(self) -> tuple[int, bytes]:
        """Waits for the next call; returns its number and content. Raises EOFError as `receive` does."""
        message = self.receive()
        return PROGRESS.unpack_from(message)[0], message[PROGRESS.size :]

    def finish(self, number: int) -> None:
        """Reports that a call is finished that needs no reply."""
        self._send(_Kind.DONE, PROGRESS.pack(number))

    def reply(self, number: int, returned: bytes) -> None:
        """Sends the result of a call, which is finished."""
        self._send(_Kind.REPLY, PROGRESS.pack(number) + returned)

    def put_out(self, number: int, output: bytes) -> None:
        """Sends the output of a step, which is finished."""
        self._send(_Kind.OUTPUT, PROGRESS.pack(number) + output)

    def fail(self, reason: str) -> None:
        """Reports the failure that ends this worker, and with it the cell."""
        self._send(_Kind.FAILED, reason.encode())

    def _send(self, kind: _Kind, payload: bytes) -> None:
        self._connection.send_bytes(bytes([kind]) + payload)


@dataclass(eq=False)
class _Worker:
    rank: int
    process: BaseProcess
    connection: Connection
    done: int = 0
    replies: "deque[tuple[int, bytes]]" = field(default_factory=deque)

    def __str__(self) -> str:
        return f"worker of rank {self.rank} (process {self.process.pid})"


class LocalWorkers:
    def __init__(self, context: BaseContext, work: Work, ranks: Sequence[int], end: Callable[[str], None]) -> None:
        """Starts a process for each rank. `end` receives once why the first of them has failed. Call it in the main
        thread before any other thread starts: processes exit with the thread that started them, and may be forks."""
        self._end, self._changed = end, Condition()
        self._closing = False
        self.on_output: Callable[[int, bytes], None] = lambda _number, _output: None
        """Receives the outputs of steps, in a thread."""
        self._workers = [_start(context, work, place, rank) for place, rank in enumerate(ranks, start=1)]
        for worker in self._workers:
            Thread(target=self._attend, args=(worker,), name=f"worker-{worker.rank}", daemon=True).start()

    def send(self, message: bytes) -> None:
        """Sends every worker a message. One that is gone is reported by its thread."""
        for worker in self._workers:
            try:
                worker.connection.send_bytes(message)
            except OSError:
                continue

    def call(self, number: int, call: bytes) -> None:
        self.send(PROGRESS.pack(number) + call)

    def replies(self, number: int) -> list[bytes]:
        """Waits for each worker's result of a call; returns them in the order of ranks."""
        with self._changed:
            return [self._reply(worker, number) for worker in self._workers]

    def finished(self, own: int) -> int:
        """Returns the last call that the whole node has finished; `own`: that its first worker has."""
        return min(own, *(worker.done for worker in self._workers)) if self._workers else own

    def close(self) -> None:
        """Kills the workers. They print nothing from then on."""
        self._closing = True
        for worker in self._workers:
            worker.process.kill()

    def _reply(self, worker: _Worker, number: int) -> bytes:
        while True:
            self._changed.wait_for(lambda: worker.replies)
            replied, returned = worker.replies.popleft()
            if replied == number:
                return returned
            # otherwise it belongs to a call whose caller gave up

    def _attend(self, worker: _Worker) -> None:
        exited = os.pidfd_open(worker.process.pid or 0)
        try:
            while worker.connection in wait([worker.connection, exited]):
                self._take(worker, worker.connection.recv_bytes())
        except (EOFError, OSError):
            pass
        finally:
            os.close(exited)
        self._lost(f"{worker} died with {_how(worker.process)}")

    def _take(self, worker: _Worker, message: bytes) -> None:
        kind, payload = _Kind(message[0]), message[1:]
        if kind is _Kind.FAILED:
            sleep(CAUSE_FIRST_S)
            self._lost(f"{worker} failed: {payload.decode(errors='replace')}")
            return
        number, returned = PROGRESS.unpack_from(payload)[0], payload[PROGRESS.size :]
        if kind is _Kind.OUTPUT:
            self.on_output(number, returned)
        if kind is _Kind.REPLY:
            with self._changed:
                worker.replies.append((number, returned))
                self._changed.notify_all()
        worker.done = number

    def _lost(self, reason: str) -> None:
        with self._changed:
            if self._closing:
                return
            self._closing = True
        self._end(reason)


def _start(context: BaseContext, work: Work, place: int, rank: int) -> _Worker:
    ours, theirs = context.Pipe()
    arguments: tuple[Any, ...] = (work, place, os.getpid(), ours, theirs)
    process: BaseProcess = context.Process(  # type: ignore[attr-defined]  # of every context
        target=_run, args=arguments, name=f"worker {rank}", daemon=True
    )
    process.start()
    theirs.close()
    return _Worker(rank, process, ours)


def _run(work: Work, place: int, owner_pid: int, owners: Connection, connection: Connection) -> None:
    exit_with_parent(owner_pid)
    for stop in STOP_SIGNALS:
        signal.signal(stop, signal.SIG_IGN)  # which an engine's whole group receives; the owner decides
    owners.close()
    link, status = OwnerLink(connection), 0
    try:
        work(place, link)
    except (EOFError, BrokenPipeError):
        pass
    except Exception as error:
        status = 1
        traceback.print_exc()
        link.fail(f"{type(error).__name__}: {error}")
    finally:
        os._exit(status)  # without waiting for threads in collectives


def _how(process: BaseProcess) -> str:
    process.join(_EXIT_S)
    code = process.exitcode
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return "an unknown status: it has closed its pipe and still runs" if code is None else f"exit status {code}"
