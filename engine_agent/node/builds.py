"""Engine builds of one node: refuses those that this host cannot run, fetches others from the control plane or S3 in a
thread, and locks them for the engine. The agent fetches them itself, because its engines must neither have its
credential nor be able to change what other engines run."""

import contextlib
import errno
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from pathlib import Path

from engine_agent.engines.artifacts import CannotFetch, Entry, acquire, entry_of, size_limit
from engine_agent.engines.base import EngineUnavailable
from engine_agent.engines.builds import store
from engine_agent.engines.s3_artifact import Arrived, download
from engine_agent.node.checks.external_builds import environments, external_program
from engine_agent.node.enrolment import Enrolment, control_connection
from engine_agent.node.identity import Identity
from engine_agent.node.telemetry.fingerprint import read_environment_stack
from engine_agent.protocol.engine_builds import (
    BUILD_FILE,
    BadBuild,
    BuildFacts,
    EngineBuild,
    HostFacts,
    part_names,
    why_unsuitable,
)
from engine_agent.protocol.manifest import DIGEST_PREFIX, MANIFEST_NAME, MOST_MANIFEST_BYTES
from engine_agent.protocol.messages import NODE_BUILDS_MAX, Artifact, NodeBuild

ANSWER_LIMIT_S = 30.0
ATTEMPTS = 5
"""Of one file without a further byte, over all servers."""
FIRST_PAUSE_S, LONGEST_PAUSE_S, JITTER = 0.5, 30.0, 0.5
BUSY_LIMIT_S = 3600.0
"""How long a control plane may be too busy for one file: all hosts of a fleet may fetch at the same time."""
CHUNK_BYTES = 256 * 1024
MOST_DIGITS = 5
WORDS_EVERY_S = 5.0
"""Interval of changes in the progress; each one causes a report to the control plane."""


@dataclass(frozen=True, slots=True)
class HeldBuild:
    """A complete build. `lock` is a descriptor that keeps it while it is open; the caller closes it. `stack`: versions
    for the fingerprint that the build's digest does not determine."""

    program: Path
    lock: int
    stack: Mapping[str, str] = field(default_factory=dict)


class _Fetch:
    """One build on its way."""

    def __init__(self, build: EngineBuild, now_s: Callable[[], float]) -> None:
        self.build = build
        self.trouble = ""
        self.is_over = False
        self.arrived = Arrived()
        self.unpacked = 0
        self._now_s = now_s
        self._words, self._words_at_s = "", 0.0

    def words(self) -> str:
        now_s = self._now_s()
        if not self._words or now_s - self._words_at_s >= WORDS_EVERY_S:
            facts = self.build.facts
            whole = facts.unpacked_bytes if facts is not None else 0
            doing = f"unpacked {self.unpacked * 100 // whole} %" if self.unpacked and whole else self.arrived.words()
            self._words, self._words_at_s = f"build {self.build.name}: {doing}", now_s
        return self._words


class NodeBuilds:
    """`on_change` is called from another thread when a fetch has ended."""

    def __init__(
        self,
        folder: Path,
        enrolment: Enrolment,
        on_change: Callable[[], None],
        host: Callable[[], HostFacts] = store.host_facts,
        now_s: Callable[[], float] = time.monotonic,
        root: Path = Path("/"),
    ) -> None:
        self._folder = folder
        self._root = root
        self._enrolment = enrolment
        self._on_change = on_change
        self._host = host
        self._now_s = now_s
        self._fetches: dict[str, _Fetch] = {}
        self._known: dict[str, BuildFacts | None] = {}
        self._closed = threading.Event()

    def obtain(self, build: EngineBuild) -> HeldBuild | None:
        """Returns the build if it is complete; else starts to fetch it and returns None. Raises EngineUnavailable if
        this host cannot run it, or the fetch failed; the next call tries again."""
        facts = build.facts
        if facts is None:
            raise EngineUnavailable(f"the order names build {build.name} without its facts")
        if why := why_unsuitable(facts, self._host()):
            raise EngineUnavailable(f"build {build.name} cannot run here: {why}")
        if build.is_external:
            return self._held_external(build)
        try:
            entry = entry_of(build.digest, self._folder)
        except ValueError as error:
            raise EngineUnavailable(f"build {build.name}: {error}") from error
        try:
            lock = store.hold(entry)
        except OSError as error:
            raise EngineUnavailable(f"build {build.name} cannot be read: {error}") from error
        if lock is not None:
            return HeldBuild(store.program_of(entry, facts), lock)
        fetch = self._fetches.get(build.digest)
        if fetch is not None and fetch.is_over:
            del self._fetches[build.digest]
            if fetch.trouble:
                raise EngineUnavailable(fetch.trouble)
            fetch = None
        if fetch is None:
            fetch = self._fetches[build.digest] = _Fetch(build, self._now_s)
            name = f"build {build.name}"
            threading.Thread(target=self._run, args=(fetch, entry, facts), name=name, daemon=True).start()
        return None

    def _held_external(self, build: EngineBuild) -> HeldBuild:
        """Nothing removes the files of the machine's image, so that its lock keeps nothing."""
        try:
            program = external_program(build, environments(self._folder.parent, self._root))
        except BadBuild as error:
            raise EngineUnavailable(f"build {build.name}: {error}") from None
        return HeldBuild(program, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), read_environment_stack(program))

    def words(self, build: EngineBuild | None) -> str:
        """The progress of a build that is being fetched; an empty text for others."""
        fetch = self._fetches.get(build.digest) if build is not None else None
        return fetch.words() if fetch is not None and not fetch.is_over else ""

    def report(self) -> tuple[NodeBuild, ...]:
        """The builds of this machine, and those that this node is fetching."""
        coming = {fetch.build.digest: fetch for fetch in [*self._fetches.values()] if not fetch.is_over}
        builds = [_in_words(fetch.build.digest, fetch.build.facts, fetch.words()) for fetch in coming.values()]
        with contextlib.suppress(FileNotFoundError):
            for entry in store.entries(self._folder):
                digest = f"{DIGEST_PREFIX}{entry.hex_digest}"
                if digest not in coming and entry.is_complete:
                    if digest not in self._known:
                        self._known[digest] = store.facts_of(entry)
                    builds.append(_in_words(digest, self._known[digest]))
        return tuple(sorted(builds, key=lambda one: one.digest)[:NODE_BUILDS_MAX])

    def close(self) -> None:
        """Ends fetches; what arrived is kept for the next one."""
        self._closed.set()

    def _run(self, fetch: _Fetch, entry: Entry, facts: BuildFacts) -> None:
        build = fetch.build
        try:
            limit = size_limit(os.environ.get(store.LIMIT_VARIABLE, ""))
            os.close(acquire(entry, partial(self._fill, fetch, entry, facts, limit), lambda: None))
        except CannotFetch as error:
            fetch.trouble = str(error)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            why = f"the disk of {self._folder} is full" if full else str(error)
            fetch.trouble = f"build {build.name} cannot be stored: {why}"
        except Exception as error:  # a thread's exception would be lost
            fetch.trouble = f"build {build.name} cannot be fetched: {type(error).__name__}: {error}"
        finally:
            fetch.is_over = True
            if not self._closed.is_set():
                self._on_change()

    def _fill(self, fetch: _Fetch, entry: Entry, facts: BuildFacts, limit: int | None) -> None:
        build = fetch.build
        parts = store.begin(entry, build, facts, limit)
        if build.uri and not parts.folder.is_dir():
            download(Artifact(build.uri, build.digest), parts, lambda _: None, fetch.arrived, lambda _: None)
        elif not build.uri:
            self._download(fetch, parts, facts)

        def count(size: int) -> None:
            if self._closed.is_set():
                raise CannotFetch("the agent stops")
            fetch.unpacked += size

        store.finish(entry, build, facts, count)

    # --- from the control plane ---------------------------------------------------------------------------------------

    def _download(self, fetch: _Fetch, parts: Entry, facts: BuildFacts) -> None:
        """Completes the folder of parts; each file is checked, and an incomplete one is continued. Raises CannotFetch
        if the control plane has no such build, or it does not arrive."""
        folder, build = parts.folder, fetch.build
        folder.mkdir(mode=0o700, exist_ok=True)
        self._file(fetch, folder / MANIFEST_NAME, MOST_MANIFEST_BYTES)
        manifest = store.check_manifest((folder / MANIFEST_NAME).read_bytes(), build, facts)
        fetch.arrived.total = facts.packed_bytes
        for name in (BUILD_FILE, *part_names(facts)):
            path, wanted = folder / name, manifest.files[name]
            for _ in range(2):  # a wrong beginning of an earlier attempt costs one more
                if not store.is_whole(path, wanted):
                    self._file(fetch, path, facts.packed_bytes)
                if store.is_whole(path, wanted):
                    break
                path.unlink(missing_ok=True)
            else:
                raise CannotFetch(f"build {build.name} arrives damaged: {name} differs from its manifest")

    def _file(self, fetch: _Fetch, path: Path, most_bytes: int) -> None:
        """Downloads one file from any server, from where an earlier attempt stopped."""
        failures, build = 0, fetch.build
        coming = path.with_name(f"{path.name}.coming")
        pause_s, busy_until_s = FIRST_PAUSE_S, self._now_s() + BUSY_LIMIT_S
        while True:
            before = coming.stat().st_size if coming.exists() else 0
            trouble, wait_s = "", 0.0
            for server in self._enrolment.servers.all:
                try:
                    self._append(server, fetch, path.name, coming, most_bytes)
                    coming.replace(path)
                    return
                except _RetryLater as error:
                    trouble, wait_s = f"{server}: {error}", max(wait_s, error.after_s)
                except (OSError, HTTPException, ValueError) as error:
                    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                        raise
                    trouble = f"{server}: {error}"
            has_grown = coming.exists() and coming.stat().st_size > before
            if has_grown:
                failures, pause_s, busy_until_s = 0, FIRST_PAUSE_S, self._now_s() + BUSY_LIMIT_S
            is_busy = wait_s > 0 and self._now_s() < busy_until_s
            failures += not is_busy
            if failures >= ATTEMPTS:
                raise CannotFetch(f"build {build.name} does not arrive: {trouble}")
            if self._closed.wait(min(LONGEST_PAUSE_S, max(wait_s, pause_s)) * random.uniform(1, 1 + JITTER)):
                raise CannotFetch("the agent stops")
            pause_s *= 1 if is_busy else 2

    def _append(self, server: str, fetch: _Fetch, name: str, coming: Path, most_bytes: int) -> None:
        at = coming.stat().st_size if coming.exists() else 0
        credential = self._enrolment.stored_credential()
        connection = control_connection(server, Identity(self._enrolment.home), ANSWER_LIMIT_S)
        try:
            headers = {"Authorization": f"Bearer {credential}", **({"Range": f"bytes={at}-"} if at else {})}
            connection.request("GET", f"/agents/builds/{fetch.build.digest.partition(':')[2]}/{name}", headers=headers)
            answer = connection.getresponse()
            if answer.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                coming.unlink(missing_ok=True)
                raise _RetryLater("it has another file")
            self._check_answer(answer)
            if answer.status == HTTPStatus.OK and at:
                coming.unlink()
                at = 0
            self._receive(answer, fetch, coming, most_bytes - at)
        finally:
            connection.close()

    def _check_answer(self, answer: HTTPResponse) -> None:
        if answer.status in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
            return
        if answer.status == HTTPStatus.TOO_MANY_REQUESTS or answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            stated = answer.headers.get("Retry-After", "")
            after_s = float(stated) if stated.isdecimal() and len(stated) <= MOST_DIGITS else FIRST_PAUSE_S
            raise _RetryLater(f"it answered {answer.status}", after_s)
        raise ValueError(f"it answered {answer.status}: {answer.read(300).decode(errors='replace')}")

    def _receive(self, answer: HTTPResponse, fetch: _Fetch, coming: Path, most_bytes: int) -> None:
        left = answer.length
        if left is None or left > most_bytes:
            raise ValueError(f"it sends {left} bytes; at most {most_bytes} may be")
        with coming.open("ab") as file:
            while left and (chunk := answer.read1(CHUNK_BYTES)):
                file.write(chunk)
                left -= len(chunk)
                fetch.arrived.add(len(chunk))
                if self._closed.is_set():
                    raise CannotFetch("the agent stops")
            file.flush()
            os.fsync(file.fileno())
        if left:
            raise _RetryLater(f"{left} bytes are missing")


def _in_words(digest: str, facts: BuildFacts | None, fetching: str = "") -> NodeBuild:
    if facts is None:
        return NodeBuild(digest, fetching=fetching)
    return NodeBuild(digest, facts.serves, facts.version, facts.unpacked_bytes, fetching)


class _RetryLater(ValueError):
    """A server cannot answer now. `after_s`: the pause of a busy one; 0: the answer broke off."""

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s
