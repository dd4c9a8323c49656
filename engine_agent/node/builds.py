"""Engine builds of one node: refuses those that this host cannot run, fetches others from the control plane or S3, and
locks them for the engine."""

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from engine_agent.engines.artifacts import CannotFetch, Entry, acquire, entry_of, size_limit
from engine_agent.engines.base import EngineUnavailable
from engine_agent.engines.builds import store
from engine_agent.engines.s3_artifact import download
from engine_agent.node.checks.external_builds import environments, external_program
from engine_agent.node.downloads import Downloads, Fetch
from engine_agent.node.telemetry.fingerprint import read_environment_stack
from engine_agent.protocol.engine_builds import (
    BadBuild,
    BuildFacts,
    EngineBuild,
    HostFacts,
    why_unsuitable,
)
from engine_agent.protocol.manifest import DIGEST_PREFIX, MANIFEST_NAME, MOST_MANIFEST_BYTES
from engine_agent.protocol.messages import Artifact
from engine_agent.protocol.telemetry_messages import NODE_BUILDS_MAX, NodeBuild

BUILDS = "builds"
"""Of the machine's cache, next to `fetched`. Engines cannot write to it."""


@dataclass(frozen=True, slots=True)
class HeldBuild:
    """A complete build. `lock` is a descriptor that keeps it while it is open; the caller closes it. `stack`: versions
    for the fingerprint that the build's digest does not determine."""

    program: Path
    lock: int
    stack: Mapping[str, str] = field(default_factory=dict)


class NodeBuilds:
    def __init__(
        self,
        folder: Path,
        downloads: Downloads,
        host: Callable[[], HostFacts] = store.host_facts,
        root: Path = Path("/"),
    ) -> None:
        self._folder = folder
        self._root = root
        self._downloads = downloads
        self._host = host
        self._known: dict[str, BuildFacts | None] = {}
        self._coming: dict[str, BuildFacts] = {}

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
        fill = partial(self._acquire, build, entry, facts)
        self._coming[build.digest] = facts
        try:
            self._downloads.begin(build.digest, f"build {build.name}", fill, facts.unpacked_bytes)
        except CannotFetch as error:
            raise EngineUnavailable(str(error)) from None
        return None

    def _held_external(self, build: EngineBuild) -> HeldBuild:
        """Nothing removes the files of the machine's image, so that its lock keeps nothing."""
        try:
            program = external_program(build, environments(self._folder.parent, self._root))
        except BadBuild as error:
            raise EngineUnavailable(f"build {build.name}: {error}") from None
        return HeldBuild(program, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), read_environment_stack(program))

    def report(self) -> tuple[NodeBuild, ...]:
        """The builds of this machine, and those that this node is fetching."""
        coming = {fetch.digest: fetch.words() for fetch in self._downloads.running if fetch.digest in self._coming}
        builds = [self._in_words(digest, self._coming[digest], words) for digest, words in coming.items()]
        with contextlib.suppress(FileNotFoundError):
            for entry in store.entries(self._folder):
                digest = f"{DIGEST_PREFIX}{entry.hex_digest}"
                if digest not in coming and entry.is_complete:
                    if digest not in self._known:
                        self._known[digest] = store.facts_of(entry)
                    builds.append(self._in_words(digest, self._known[digest]))
        return tuple(sorted(builds, key=lambda one: one.digest)[:NODE_BUILDS_MAX])

    def _in_words(self, digest: str, facts: BuildFacts | None, fetching: str = "") -> NodeBuild:
        peer_bytes = self._downloads.peer_bytes(digest)
        if facts is None:
            return NodeBuild(digest, fetching=fetching, peer_bytes=peer_bytes)
        return NodeBuild(digest, facts.serves, facts.version, facts.unpacked_bytes, fetching, peer_bytes)

    def _acquire(self, build: EngineBuild, entry: Entry, facts: BuildFacts, fetch: Fetch) -> None:
        limit = size_limit(os.environ.get(store.LIMIT_VARIABLE, ""))
        os.close(acquire(entry, lambda: self._fill(fetch, build, entry, facts, limit), lambda: None))

    def _fill(self, fetch: Fetch, build: EngineBuild, entry: Entry, facts: BuildFacts, limit: int | None) -> None:
        parts = store.begin(entry, build, facts, limit)
        if build.uri and not parts.folder.is_dir():
            first = partial(self._downloads.files_of_peers, fetch)
            download(Artifact(build.uri, build.digest), parts, lambda _: None, fetch.arrived, lambda _: None, first)
        elif not build.uri:
            self._download(fetch, build, parts, facts)

        def count(size: int) -> None:
            self._downloads.check_open(fetch)
            fetch.unpacked += size

        store.finish(entry, build, facts, count)

    def _download(self, fetch: Fetch, build: EngineBuild, parts: Entry, facts: BuildFacts) -> None:
        """Completes the folder of parts from the control plane; each file is checked. Raises CannotFetch if the control
        plane has no such build, or it does not arrive."""
        folder, url = parts.folder, f"/agents/builds/{parts.hex_digest}"
        folder.mkdir(mode=0o700, exist_ok=True)
        self._downloads.file(fetch, f"{url}/{MANIFEST_NAME}", folder / MANIFEST_NAME, MOST_MANIFEST_BYTES)
        manifest = store.check_manifest((folder / MANIFEST_NAME).read_bytes(), build, facts)
        fetch.arrived.total = facts.packed_bytes
        self._downloads.files(fetch, url, folder, manifest.files, dict.fromkeys(manifest.files, facts.packed_bytes))
