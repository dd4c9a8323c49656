"""Time until a two-node cell and vLLM's own `--nnodes` notice a dead or hung member.

    .venv/bin/python -m bench executor_detection [--hang-s 5] [--skip-nnodes] [--write]

Each event gets a replica of its own, all on this machine. Prints Markdown; `--write` puts it beside this file. A time
is from the event to the first answer of /health that is not 200; for a killed leader, to the end of the follower. Root
can cut the network: the follower then runs in a network namespace, and its link goes down.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import httpx

from bench.cells.executor_cell import ARGS, FIRST_PORT, PYTHON, START_LIMIT_S, Engine, Host, artifact, engine
from bench.places import PAGES, ROOT

GIVE_UP_S = 30.0
NEVER = f"not within {GIVE_UP_S:.0f} s"
LIBRARY_PORT = FIRST_PORT + 300
HERE_ALONE = (Host(), Host())
NAMESPACE = "switchyard-bench"
LINK = ("sybench0", "sybench1")
APART = (Host("10.77.0.1"), Host("10.77.0.2", ("ip", "netns", "exec", NAMESPACE)))
"""Leader and follower at the two ends of a link between network namespaces."""

SERVE = "from vllm.entrypoints.launchers.api_server.entry import main; main()"
FOLLOW = """
from vllm.entrypoints.cli.serve import run_headless
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
arguments = make_arg_parser(FlexibleArgumentParser()).parse_args()
arguments.api_server_count = 0
run_headless(arguments)
"""
"""What `vllm serve` and `vllm serve --headless` do; that program itself needs the package to be called vllm."""

Hosts = tuple[Host, ...]
Maker = Callable[[float, Hosts], AbstractContextManager["Pair"]]


class Pair:
    """Two members, as this bench sees them: where to check health, and which processes to signal."""

    def __init__(self, url: str, leader: int, follower: int) -> None:
        self.url, self.leader, self.follower = url, leader, follower

    def status(self) -> int:
        """Of /health; 0: no response."""
        try:
            return httpx.get(f"{self.url}/health", timeout=1).status_code
        except httpx.TransportError:
            return 0

    def keep_busy(self) -> None:
        """Start a long answer and return once it has begun."""
        begun = threading.Event()

        def read() -> None:
            body = {"model": "m", "prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True}
            try:
                with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=120) as response:
                    for _ in response.iter_lines():
                        begun.set()
            except httpx.TransportError:
                begun.set()

        threading.Thread(target=read, daemon=True).start()
        begun.wait(60)


@contextmanager
def apart() -> Iterator[None]:
    """A network namespace for the follower, until the block ends."""
    near, far = LINK
    for command in (
        f"ip netns add {NAMESPACE}",
        f"ip link add {near} type veth peer name {far} netns {NAMESPACE}",
        f"ip addr add {APART[0].address}/24 dev {near}",
        f"ip link set {near} up",
        f"ip -n {NAMESPACE} addr add {APART[1].address}/24 dev {far}",
        f"ip -n {NAMESPACE} link set {far} up",
        f"ip -n {NAMESPACE} link set lo up",
    ):
        subprocess.run(command.split(), check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "link", "del", near], check=False)
        subprocess.run(["ip", "netns", "del", NAMESPACE], check=False)


@contextmanager
def cell(hang_s: float, hosts: Hosts) -> Iterator[Pair]:
    limit = {"SWITCHYARD_CELL_HANG_S": str(hang_s)}
    collectives = {} if hosts == HERE_ALONE else {"SWITCHYARD_CELL_COLLECTIVES": "network"}
    with engine(6, 2, "--tensor-parallel-size", "2", hosts=hosts, **limit, **collectives) as started:
        yield _pair(started)


def _pair(started: Engine) -> Pair:
    return Pair(started.url, started.ranks[0].pid, started.ranks[1].pid)


@contextmanager
def own_nodes(hang_s: float, hosts: Hosts) -> Iterator[Pair]:
    folder, _ = artifact()
    nodes = [_start_node(rank, folder, hang_s, hosts) for rank in range(2)]
    pair = Pair(f"http://{hosts[0].address}:{LIBRARY_PORT}", nodes[0].pid, nodes[1].pid)
    deadline = time.monotonic() + START_LIMIT_S
    try:
        while pair.status() != 200:
            if time.monotonic() > deadline:
                sys.exit("vLLM's own nodes did not start")
            time.sleep(0.2)
        yield pair
    finally:
        for node in nodes:
            subprocess.run(["pkill", "-9", "-s", str(node.pid)], check=False)
            node.wait(30)


def _start_node(rank: int, folder: Path, hang_s: float, hosts: Hosts) -> subprocess.Popen[bytes]:
    argv = [
        *hosts[rank].inside,
        *(str(PYTHON), "-c", FOLLOW if rank else SERVE),
        *("--model", str(folder), "--served-model-name", "m", *ARGS),
        *("--tensor-parallel-size", "2", "--nnodes", "2", "--node-rank", str(rank)),
        *("--master-addr", hosts[0].address, "--master-port", str(LIBRARY_PORT + 1)),
        *("--host", hosts[0].address, "--port", str(LIBRARY_PORT), *(("--headless",) if rank else ())),
    ]
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": hosts[rank].address,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo" if hosts == HERE_ALONE else LINK[rank],
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1",
        "OMP_WAIT_POLICY": "passive",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": f"{hang_s:.0f}",
    }
    return subprocess.Popen(
        argv, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def kill(pair: Pair) -> None:
    """End every process of the follower."""
    subprocess.run(["pkill", "-9", "-s", str(pair.follower)], check=False)


def stop(pair: Pair) -> None:
    """Let every process of the follower stand still."""
    subprocess.run(["pkill", "-STOP", "-s", str(pair.follower)], check=False)


def cut(_: Pair) -> None:
    """Take the link between leader and follower down: packets vanish, nobody hangs up."""
    subprocess.run(["ip", "link", "set", LINK[0], "down"], check=True)


def noticed(pair: Pair, event: Callable[[Pair], None], busy: bool) -> str:
    """Seconds from the event until /health is not 200."""
    if busy:
        pair.keep_busy()
    began = time.monotonic()
    event(pair)
    while pair.status() == 200:
        if time.monotonic() - began > GIVE_UP_S:
            return NEVER
        time.sleep(0.02)
    return f"{time.monotonic() - began:.2f} s"


def freed(pair: Pair) -> str:
    """Seconds until no process of the follower lives, after every process of the leader was killed."""
    began = time.monotonic()
    subprocess.run(["pkill", "-9", "-s", str(pair.leader)], check=False)
    while _lives(pair.follower):
        if time.monotonic() - began > GIVE_UP_S:
            return NEVER
        time.sleep(0.02)
    return f"{time.monotonic() - began:.2f} s"


def _lives(session: int) -> bool:
    states = subprocess.run(["ps", "-o", "stat=", "-s", str(session)], capture_output=True, text=True, check=False)
    return any(not state.startswith("Z") for state in states.stdout.split())


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hang-s", type=float, default=5.0)
    parser.add_argument("--skip-nnodes", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    makers: list[Maker] = [cell] if options.skip_nnodes else [cell, own_nodes]
    limit = f"limit {options.hang_s:g} s"
    rows: list[tuple[str, Hosts, Callable[[Pair], str]]] = [
        ("follower SIGKILL, busy", HERE_ALONE, lambda pair: noticed(pair, kill, True)),
        ("follower SIGKILL, idle", HERE_ALONE, lambda pair: noticed(pair, kill, False)),
        (f"follower SIGSTOP, busy, {limit}", HERE_ALONE, lambda pair: noticed(pair, stop, True)),
        (f"follower SIGSTOP, idle, {limit}", HERE_ALONE, lambda pair: noticed(pair, stop, False)),
        ("leader SIGKILL: follower gone", HERE_ALONE, freed),
    ]
    if os.getuid() == 0:
        rows += [
            (f"network cut, busy, {limit}", APART, lambda pair: noticed(pair, cut, True)),
            (f"network cut, idle, {limit}", APART, lambda pair: noticed(pair, cut, False)),
        ]
    lines = [
        "# How soon a member's end is noticed\n",
        f"{time.strftime('%Y-%m-%d')}, SmolLM2-135M, tensor-parallel 2, both members on one machine; "
        f"load average before the run {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores.\n",
        "| event | cell" + (" |" if options.skip_nnodes else " | vLLM's --nnodes |"),
        "| --- | ---" + (" |" if options.skip_nnodes else " | --- |"),
    ]
    for name, hosts, measure in rows:
        found = []
        for maker in makers:
            with apart() if hosts == APART else nullcontext(), maker(options.hang_s, hosts) as pair:
                found.append(measure(pair))
        lines.append(f"| {name} | {' | '.join(found)} |")
        print(lines[-1], flush=True)
    result = "\n".join(lines) + "\n"
    print(result)
    if options.write:
        (PAGES / "executor_detection.md").write_text(result)
