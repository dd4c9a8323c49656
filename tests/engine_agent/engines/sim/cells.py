"""Real simulator processes for tests: one cell on free ports, whose members are killed when the test is over."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from engine_agent.engines.base import CELL_CERTIFICATE_VARIABLE
from engine_agent.node.identity import throwaway_certificate
from engine_agent.protocol.fingerprint import FINGERPRINT_VARIABLE, fingerprint_to_variable
from tests.asking import CLIENT
from tests.ports import free_port

MODEL = "sim-70b"
DEADLINE_S = 60.0
"""For all that must happen, also on a busy machine."""
SECRET = "the cell's secret"
FAST = ("--load-time-s", "0.05", "--decode-step-ms", "2", "--decode-step-per-seq-ms", "0", "--step-jitter", "0")
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "tell me a story"}]}
ENDLESS = {**CHAT, "stream": True, "max_tokens": 8000, "ignore_eos": True}
"""16 s of stream at the pace of `FAST`: longer than any test waits for it."""


class Member:
    def __init__(self, process: "subprocess.Popen[bytes]", log: Path, node_id: str, port: int, admin_port: int) -> None:
        self.process = process
        self.log = log
        self.node_id = node_id
        self.url = f"http://127.0.0.1:{port}"
        self.admin_url = f"http://127.0.0.1:{admin_port}"

    def output(self) -> str:
        return self.log.read_text()

    def exit_status(self) -> int:
        """Waits until it exits, and returns its status."""
        return self.process.wait(DEADLINE_S)

    def chat(self, body: dict[str, Any], timeout_s: float = DEADLINE_S) -> httpx.Response:
        """Sends a request to the leader, and reads the whole answer."""
        return CLIENT.post(f"{self.url}/v1/chat/completions", json=body, timeout=timeout_s)

    @contextmanager
    def streaming(self, body: dict[str, Any]) -> Iterator[Iterator[str]]:
        """Requests a stream from the leader; yields the non-empty lines after the first."""
        with CLIENT.stream("POST", f"{self.url}/v1/chat/completions", json=body) as answer:
            lines = (line for line in answer.raise_for_status().iter_lines() if line)
            next(lines)
            yield lines

    def inject(self, **fault: object) -> None:
        CLIENT.post(f"{self.admin_url}/fault", json=fault).raise_for_status()

    def lift_faults(self) -> None:
        CLIENT.delete(f"{self.admin_url}/fault").raise_for_status()

    def health(self) -> tuple[int, str]:
        """Status and reason on the administration port; status 0 while it does not answer."""
        try:
            answer = CLIENT.get(f"{self.admin_url}/health")
        except httpx.TransportError as error:
            return 0, str(error)
        return answer.status_code, answer.json()["reason"]

    def metric(self, name: str) -> float:
        """Sum of the samples of one of the leader's metrics."""
        page = CLIENT.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in page if line.startswith(f"{name}{{"))


class Cell:
    """A leader and its followers; members that still run are killed at the end."""

    def __init__(self, home: Path, followers: int) -> None:
        self._home = home
        self._followers = followers
        self._ports = [free_port() for _ in range(3 + 2 * followers)]
        self._stack = ExitStack()

    @property
    def rendezvous_port(self) -> int:
        return self._ports[0]

    def node_id(self, rank: int) -> str:
        """The id of the node that has this rank."""
        return f"n-{os.getpid() % 0xFFFFFF:06x}{rank:02x}"

    def ports(self, rank: int) -> tuple[int, int]:
        """Port and administration port of a rank."""
        return self._ports[1 + 2 * rank], self._ports[2 + 2 * rank]

    def command(self, rank: int, *arguments: str, generation: str = "3") -> list[str]:
        port, admin_port = self.ports(rank)
        return [
            *(sys.executable, "-m", "engine_agent.engines.sim", "--node-id", self.node_id(rank), "--cell", "c-1"),
            *("--generation", generation, "--rank", str(rank), "--role", "follower" if rank else "leader"),
            *("--port", str(port), "--admin-port", str(admin_port), "--served-model", MODEL),
            *("--leader", f"127.0.0.1:{self.rendezvous_port}", "--followers", str(self._followers)),
            *(*FAST, *arguments),
        ]

    def start(
        self,
        rank: int,
        *arguments: str,
        secret: str = SECRET,
        generation: str = "3",
        fingerprint: Mapping[str, str] | None = None,
    ) -> Member:
        """Starts one member; without `fingerprint` it gets none, as when started by hand."""
        environment = {**os.environ, "SWITCHYARD_CELL_SECRET": secret}
        if rank == 0:
            environment[CELL_CERTIFICATE_VARIABLE] = throwaway_certificate()
        if fingerprint is not None:
            environment[FINGERPRINT_VARIABLE] = fingerprint_to_variable(fingerprint)
        log = self._home / f"rank-{rank}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                self.command(rank, *arguments, generation=generation),
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return Member(process, log, self.node_id(rank), *self.ports(rank))

    def stop(self) -> None:
        self._stack.close()


@contextmanager
def running_cell(home: Path, followers: int, *arguments: str) -> Iterator[list[Member]]:
    """Yields a whole cell that is ready; members in the order of their ranks."""
    cell = Cell(home, followers)
    try:
        members = [cell.start(rank, *arguments) for rank in range(followers + 1)]
        for member in members:
            until(lambda member=member: member.health()[0] == 200, member.output)  # type: ignore[misc]
        yield members
    finally:
        cell.stop()


def until(happened: Callable[[], bool], context: Callable[[], str]) -> None:
    """Polls until it happened; otherwise fails with the text of `context`."""
    deadline = time.monotonic() + DEADLINE_S
    while not happened():
        if time.monotonic() > deadline:
            raise AssertionError(f"it did not happen within {DEADLINE_S:g} s: {context()}")
        time.sleep(0.01)
