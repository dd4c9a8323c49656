"""The workers of a node besides its first: they make its calls, and the end of one of them is named once."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from queue import Queue
from threading import Event

import psutil
import pytest

from engine_agent.engines.vllm.cell.local_workers import LocalWorkers, OwnerLink, Work, parts_of
from tests.engine_agent.engines.vllm.cell.members import LIMIT_S
from tests.session_guard import holds_within

pytestmark = pytest.mark.processes

RANKS = (5, 6, 7)
"""Of the second node of four workers each, whose first worker is rank 4."""


class Node:
    """Local workers in forks of this process. Their end is put into a queue instead of ending a process."""

    def __init__(self, work: Work) -> None:
        self.ends: Queue[str] = Queue()
        self.outputs: Queue[tuple[int, bytes]] = Queue()
        self.workers = LocalWorkers(get_context("fork"), work, RANKS, self.ends.put)
        self.workers.on_output = lambda number, output: self.outputs.put((number, output))

    def pid(self, place: int) -> int:
        return self.workers._workers[place].process.pid or 0


Nodes = Callable[[Work], Node]


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made: list[Node] = []

    def make(work: Work) -> Node:
        made.append(Node(work))
        return made[-1]

    yield make
    for node in made:
        node.workers.close()
        for worker in node.workers._workers:
            worker.process.join(LIMIT_S)


def answering(place: int, owner: OwnerLink) -> None:
    """Replies to each call, puts out each step, and fails or exits when a call requests it."""
    while True:
        number, call = owner.next_call()
        if call == b"step":
            owner.put_out(number, b"tokens") if place == 2 else owner.finish(number)
        elif call == b"fail":
            raise ValueError("no")
        elif call == b"exit":
            os._exit(3)
        else:
            owner.reply(number, call * place)


def test_all_reply_in_the_order_of_ranks(nodes: Nodes) -> None:
    local = nodes(answering).workers
    for number, call in ((1, b"a"), (2, b"b" * 1_000_000)):
        local.call(number, call)
        assert local.replies(number) == [call, call * 2, call * 3]
    assert local.finished(2) == 2


def test_a_step_has_one_output_and_is_finished_by_all(nodes: Nodes) -> None:
    node = nodes(answering)
    node.workers.call(1, b"step")
    assert node.outputs.get(timeout=LIMIT_S) == (1, b"tokens")
    assert holds_within(lambda: node.workers.finished(1) == 1, LIMIT_S)
    assert node.workers.finished(0) == 0
    os.kill(node.pid(0), signal.SIGSTOP)
    node.workers.call(2, b"step")
    assert node.outputs.get(timeout=LIMIT_S) == (2, b"tokens")
    assert node.workers.finished(2) == 1
    os.kill(node.pid(0), signal.SIGCONT)
    assert holds_within(lambda: node.workers.finished(2) == 2, LIMIT_S)


def test_a_worker_that_dies_is_named_once_with_its_signal(nodes: Nodes) -> None:
    node = nodes(answering)
    os.kill(node.pid(1), signal.SIGKILL)
    assert node.ends.get(timeout=LIMIT_S) == f"worker of rank 6 (process {node.pid(1)}) died with SIGKILL"
    os.kill(node.pid(2), signal.SIGKILL)
    node.workers._workers[2].process.join(LIMIT_S)
    node.workers.call(1, b"a")  # to workers that are gone: no error
    assert node.ends.empty()


def test_a_worker_that_exits_is_named_with_its_status(nodes: Nodes) -> None:
    node = nodes(answering)
    node.workers._workers[0].connection.send_bytes(bytes(8) + b"exit")
    assert node.ends.get(timeout=LIMIT_S) == f"worker of rank 5 (process {node.pid(0)}) died with exit status 3"


def test_a_worker_that_fails_says_why(nodes: Nodes) -> None:
    node = nodes(answering)
    node.workers._workers[0].connection.send_bytes(bytes(8) + b"fail")
    assert node.ends.get(timeout=LIMIT_S) == f"worker of rank 5 (process {node.pid(0)}) failed: ValueError: no"


def test_the_worker_that_died_is_the_cause_and_not_one_that_then_fails(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = Event()
    monkeypatch.setattr("engine_agent.engines.vllm.cell.local_workers.sleep", lambda _: reported.wait(LIMIT_S))
    node = nodes(answering)
    node.workers._workers[0].connection.send_bytes(bytes(8) + b"fail")
    os.kill(node.pid(1), signal.SIGKILL)
    assert node.ends.get(timeout=LIMIT_S).endswith("died with SIGKILL")
    reported.set()
    node.workers._workers[0].process.join(LIMIT_S)
    assert node.ends.empty()


def test_workers_that_are_closed_are_no_failure(nodes: Nodes) -> None:
    node = nodes(answering)
    for number in (1, 2):
        node.workers.call(number, b"a")
        assert len(node.workers.replies(number)) == len(RANKS)
        os.kill(node.pid(0), signal.SIGTERM)  # as the agent sends to the engine's whole group
    node.workers.close()
    for process in (worker.process for worker in node.workers._workers):
        # A thread of the workers waits for it as well, and one of the two gets the exit status a moment later.
        assert holds_within(lambda process=process: process.exitcode == -signal.SIGKILL, LIMIT_S)  # type: ignore[misc]
    assert node.ends.empty()


def test_a_node_of_one_worker_starts_none() -> None:
    local = LocalWorkers(get_context("fork"), answering, (), lambda _: None)
    local.call(1, b"a")
    assert (local.replies(1), local.finished(1)) == ([], 1)


@pytest.mark.parametrize(
    ("cores", "count", "parts"),
    [
        ({0, 1, 2, 3}, 2, [{0, 1}, {2, 3}]),
        ({9, 4, 5, 6, 8}, 2, [{4, 5}, {6, 8, 9}]),
        ({0, 1, 2}, 3, [{0}, {1}, {2}]),
        ({0, 1}, 3, []),
        ({0, 1}, 1, []),
    ],
)
def test_workers_get_neighbouring_cores_if_there_is_one_for_each(
    cores: set[int], count: int, parts: list[set[int]]
) -> None:
    assert parts_of(cores, count) == parts


def test_workers_do_not_outlive_a_killed_owner() -> None:
    script = (
        "import signal, sys; from multiprocessing import get_context\n"
        "from engine_agent.engines.vllm.cell.local_workers import LocalWorkers\n"
        "made = LocalWorkers(get_context('fork'), lambda *_: signal.pause(), (1, 2), print)\n"
        "print(*[each.process.pid for each in made._workers], flush=True); sys.stdin.read()"
    )
    command, pipe = [sys.executable, "-c", script], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 2
        owner.kill()
    assert holds_within(lambda: not any(psutil.pid_exists(pid) for pid in pids), LIMIT_S)
