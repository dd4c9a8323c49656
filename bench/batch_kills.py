"""Batches while what runs them is killed: `kill -9` of the batch process, the worker, web, PostgreSQL and Valkey at
random, and errors, slow answers and torn bodies of S3 where files lie there.

    .venv/bin/python -m bench.batch_kills --seconds 600 --store s3

It starts a fleet of its own on the `sim` engine, in `SWITCHYARD_HOME` (.switchyard-kills) on the ports of the
environment, and takes it down again. It judges: every `custom_id` once and no other, counts and usage equal to lines,
work resumed within 15 s of each kill, every file there with all of its bytes, nothing left of batches that ended.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

CHECKOUT = Path(__file__).resolve().parents[1]
os.environ.setdefault("SWITCHYARD_HOME", str(CHECKOUT / ".switchyard-kills"))

import httpx

from bench.live_fleet import HOME, service, wait_for

if TYPE_CHECKING:
    from lab.cloud.server import World

INGRESS = f"http://127.0.0.1:{os.environ.get('SWITCHYARD_INGRESS_PORT', '8080')}"
VICTIMS = ("batch", "worker", "web", "postgres", "valkey")
BUCKET, STORE = "switchyard-kills", "s3://switchyard-kills/fleet"
RESUMED_WITHIN_S = 15.0
BETWEEN_KILLS_S = (12.0, 30.0)
ENDED_WITHIN_S = 600.0
POLL_S = 0.25
UP_WITHIN_S = 600.0
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})


@dataclass(frozen=True, slots=True)
class Kill:
    """`at_s` on the monotonic clock; `pids` of the whole service."""

    victim: str
    at_s: float
    pids: int


@dataclass(slots=True)
class Submitted:
    """A batch and what came of it; `wrong` says what is not as it must be."""

    id: str
    file_id: str
    ids: frozenset[str]
    state: str = ""
    wrong: list[str] = field(default_factory=list)


class Progress:
    """When outcomes were seen to come to the store: times on the monotonic clock, and how much there was in all. The
    store can be looked at whatever of the control plane is killed."""

    def __init__(self, world: "World | None") -> None:
        self._world = world
        self._sizes: dict[Path, int] = {}
        self.seen: list[tuple[float, int]] = []

    def watch(self, ending: threading.Event) -> None:
        while not ending.wait(POLL_S):
            done = self._world.count("PutObject") if self._world else self._bytes()
            if not self.seen or done > self.seen[-1][1]:
                self.seen.append((time.monotonic(), done))

    def _bytes(self) -> int:
        for journal in (HOME / "files" / "batches").glob("*/*"):
            with contextlib.suppress(FileNotFoundError):
                self._sizes[journal] = journal.stat().st_size
        return sum(self._sizes.values())


def resumed_after_s(kill: Kill, progress: Sequence[tuple[float, int]], until_s: float) -> float:
    """Seconds from a kill to the next outcome that came to the store; to `until_s` where there was none."""
    return next((at_s for at_s, _ in progress if at_s > kill.at_s), until_s) - kill.at_s


def judged(batch: dict[str, Any], expected: frozenset[str], output: bytes, errors: bytes) -> list[str]:
    """What is wrong with a batch that has ended, by its two files."""
    lines = [json.loads(line) for line in (output + errors).splitlines()]
    times = Counter(line["custom_id"] for line in lines)
    wrong = []
    if missing := expected - times.keys():
        wrong.append(f"{len(missing)} lines without an outcome, such as {min(missing)}")
    if strange := times.keys() - expected:
        wrong.append(f"{len(strange)} lines that nobody sent, such as {min(strange)}")
    if twice := [name for name, count in times.items() if count > 1]:
        wrong.append(f"{len(twice)} lines with several outcomes, such as {min(twice)}")
    counts = batch["request_counts"]
    answered, failed = len(output.splitlines()), len(errors.splitlines())
    if (counts["total"], counts["completed"], counts["failed"]) != (len(expected), answered, failed):
        wrong.append(f"counts {counts} beside {answered} answers and {failed} errors of {len(expected)} lines")
    used = sum(line["response"]["body"]["usage"]["completion_tokens"] for line in lines if line["error"] is None
               and line["response"]["status_code"] == 200)  # fmt: skip
    if batch["usage"]["output_tokens"] != used:
        wrong.append(f"usage has {batch['usage']['output_tokens']} output tokens, its lines have {used}")
    return wrong


class Kills:
    """A thread that kills one service after another until it is told to end."""

    def __init__(self, chance: random.Random, victims: Sequence[str]) -> None:
        self._chance, self._victims = chance, victims
        self.done: list[Kill] = []

    def run(self, ending: threading.Event) -> None:
        while not ending.wait(self._chance.uniform(*BETWEEN_KILLS_S)):
            victim = self._chance.choice(self._victims)
            with contextlib.suppress(Exception):  # it is being started again
                processes = service(victim)
                for process in reversed(processes):
                    with contextlib.suppress(Exception):
                        process.send_signal(signal.SIGKILL)
                self.done.append(Kill(victim, time.monotonic(), len(processes)))
                print(f"killed {victim}", flush=True)


def disturb(world: "World", chance: random.Random, ending: threading.Event) -> None:
    """Have S3 fail now and then, in every way that it has."""
    from lab.cloud.faults import Ending, Fault, When

    names = ("GetObject", "PutObject", "UploadPart", "CompleteMultipartUpload", "ListObjectsV2", "DeleteObjects")
    while not ending.wait(chance.uniform(0.2, 1.5)):
        name = chance.choice(names)
        kinds = (
            Fault(name, chance.choice(["InternalError", "SlowDown"]), times=chance.randrange(1, 4)),
            Fault(name, delay_s=chance.uniform(0.5, 5.0)),
            Fault(name, when=When.AFTER, ending=Ending.RESET),
            Fault(name, when=When.AFTER, ending=Ending.CUT),
        )
        if len(world.faults) < 4:
            world.faults.append(chance.choice(kinds))


@contextlib.contextmanager
def cloud() -> "Iterator[World]":
    """S3 with an empty bucket, in this process; the environment leads there what is started from now on."""
    from lab.cloud.server import World, serve

    world = World()
    with serve(world):
        world.client("s3").create_bucket(Bucket=BUCKET)
        os.environ.update(
            SWITCHYARD_FILES=STORE,
            AWS_ENDPOINT_URL_S3=world.endpoint,
            AWS_ACCESS_KEY_ID=world.access_key,
            AWS_SECRET_ACCESS_KEY=world.secret,
            AWS_REGION="us-east-1",
        )
        yield world


@contextlib.contextmanager
def fleet() -> Iterator[None]:
    command = [sys.executable, "-m", "controlplane.embedded"]
    environment = {**os.environ, "ENGINE": "sim"}
    try:
        subprocess.run(
            [*command, "up", "--detach"], cwd=CHECKOUT, env=environment, check=True, timeout=UP_WITHIN_S,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        yield
    finally:
        subprocess.run(
            [*command, "down"], cwd=CHECKOUT, env=environment, check=False, timeout=UP_WITHIN_S,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip


class Application:
    """An application that tries again what a killed process did not answer."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._client = httpx.Client(base_url=INGRESS, timeout=30.0)

    def ask(self, method: str, path: str, **said: Any) -> httpx.Response:
        def answer() -> httpx.Response | None:
            got = self._client.request(method, path, **said)
            return got if got.status_code < 500 and got.status_code != 429 else None

        found: httpx.Response = wait_for(answer, 120.0, f"{method} {path}")
        return found

    def submit(self, number: int, lines: int, tokens: int) -> Submitted:
        names = [f"b{number}-{line}" for line in range(lines)]
        content = b"".join(self._line(name, tokens) for name in names)
        form = {"files": {"file": ("in.jsonl", content)}, "data": {"purpose": "batch"}}
        stored = self.ask("POST", "/v1/files", **form).json()
        asked = {"input_file_id": stored["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = self.ask("POST", "/v1/batches", json=asked).json()
        return Submitted(batch["id"], stored["id"], frozenset(names))

    def look(self, batch: Submitted) -> dict[str, Any]:
        found: dict[str, Any] = self._client.get(f"/v1/batches/{batch.id}").raise_for_status().json()
        return found

    def judge(self, batch: Submitted) -> None:
        """Fetch all that there is of a batch that has ended."""
        shown = self.ask("GET", f"/v1/batches/{batch.id}").json()
        batch.state = shown["status"]
        output, errors = (
            self._content(batch, name) if name else b"" for name in (shown["output_file_id"], shown["error_file_id"])
        )
        self._content(batch, batch.file_id)
        batch.wrong += judged(shown, batch.ids, output, errors)
        if batch.state != "completed":
            batch.wrong.append(f"it is {batch.state}: {shown['errors']}")

    def _content(self, batch: Submitted, file_id: str) -> bytes:
        file = self.ask("GET", f"/v1/files/{file_id}").json()
        got = self.ask("GET", f"/v1/files/{file_id}/content").content
        if len(got) != file.get("bytes"):
            batch.wrong.append(f"{file_id} has {len(got)} of {file.get('bytes')} bytes")
        return got

    def _line(self, name: str, tokens: int) -> bytes:
        messages = [{"role": "user", "content": f"What is {name}?"}]
        body = {"model": self._model, "messages": messages, "max_tokens": tokens}
        line = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
        return json.dumps(line).encode() + b"\n"


def watch(application: Application, batches: list[Submitted], again: "Again", until_s: float) -> None:
    """Look at open batches, begin another when one has ended, and stop when the time is over and all have ended."""
    open_batches = list(batches)
    limit_s = until_s + ENDED_WITHIN_S
    while open_batches and time.monotonic() < limit_s:
        for batch in list(open_batches):
            with contextlib.suppress(httpx.HTTPError):
                if application.look(batch)["status"] in ENDED:
                    open_batches.remove(batch)
                    if time.monotonic() < until_s:
                        open_batches.append(again(batches))
        time.sleep(POLL_S)
    for batch in open_batches:
        batch.wrong.append(f"not ended {ENDED_WITHIN_S:.0f} s after the last kill")


@dataclass
class Again:
    """Hands in another batch."""

    application: Application
    lines: int
    tokens: int

    def __call__(self, batches: list[Submitted]) -> Submitted:
        batch = self.application.submit(len(batches), self.lines, self.tokens)
        batches.append(batch)
        return batch


def left_in_store(world: "World | None", batches: Sequence[Submitted]) -> list[str]:
    """What is left of batches that have ended; files of applications are not."""
    if world is None:
        folder = HOME / "files" / "batches"
        names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    else:
        pages = world.client("s3").get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix="fleet/batches/")
        names = [entry["Key"].split("/")[2] for page in pages for entry in page.get("Contents", ())]
    return sorted({name for name in names if name in {batch.id for batch in batches}})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long processes are killed")
    parser.add_argument("--store", choices=["folder", "s3"], default="folder")
    parser.add_argument("--model", default="sim-70b")
    parser.add_argument("--batches", type=int, default=3, help="open at once")
    parser.add_argument("--lines", type=int, default=2000, help="of each")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer at most")
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=list(VICTIMS))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(cloud()) if options.store == "s3" else None
        stack.enter_context(fleet())
        raise SystemExit(run(options, world))


def run(options: argparse.Namespace, world: "World | None") -> int:
    application, chance = Application(options.model), random.Random(options.seed)
    again, batches, progress = Again(application, options.lines, options.tokens), list[Submitted](), Progress(world)
    for _ in range(options.batches):
        again(batches)
    wait_for(lambda: application.look(batches[0])["request_counts"]["completed"], 180.0, "the first lines are answered")
    kills, ending = Kills(chance, options.victims), threading.Event()
    threads = [threading.Thread(target=kills.run, args=[ending])]
    over = threading.Event()
    watching = threading.Thread(target=progress.watch, args=[over])
    watching.start()
    if world is not None:
        threads.append(threading.Thread(target=disturb, args=[world, random.Random(options.seed + 1), ending]))
    timer = threading.Timer(options.seconds, ending.set)
    began_s = time.monotonic()
    for thread in (*threads, timer):
        thread.start()
    try:
        watch(application, batches, again, began_s + options.seconds)
    finally:
        timer.cancel()
        ending.set()
        over.set()
        for thread in (*threads, watching):
            thread.join()
    if world is not None:
        world.faults.clear()
    for batch in batches:
        if not batch.wrong:
            application.judge(batch)
    left = left_in_store(world, batches)
    return report(kills.done, batches, progress, left)


def report(kills: Sequence[Kill], batches: Sequence[Submitted], progress: Progress, left: Sequence[str]) -> int:
    ended_s = progress.seen[-1][0] if progress.seen else time.monotonic()  # the last outcome
    lines = sum(len(batch.ids) for batch in batches)
    print(f"\n{len(batches)} batches, {lines} lines, {len(kills)} kills; load average {os.getloadavg()[0]:.1f}\n")
    print("| killed | times | resumed within s, median | longest |\n| --- | --- | --- | --- |")
    late = 0
    for victim in VICTIMS:
        waits = sorted(resumed_after_s(kill, progress.seen, ended_s) for kill in kills
                       if kill.victim == victim and kill.at_s < ended_s)  # fmt: skip
        if waits:
            late += sum(wait > RESUMED_WITHIN_S for wait in waits)
            print(f"| {victim} | {len(waits)} | {waits[len(waits) // 2]:.1f} | {waits[-1]:.1f} |")
    wrong = [f"{batch.id}: {each}" for batch in batches for each in batch.wrong]
    wrong += [f"{name} has left files in the store" for name in left]
    wrong += [f"{late} times work resumed later than {RESUMED_WITHIN_S:.0f} s"] if late else []
    print(
        "\n"
        + ("\n".join(f"WRONG {each}" for each in wrong) or "Every line once, counts and usage equal, no file lost.")
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    main()
