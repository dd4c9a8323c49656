"""Fetches builds and weights in advance, as the order says: one at a time, and only while no engine waits for another
one. Those that have arrived are locked, so that room for one of them is never made at the cost of another. A spare then
keeps the weights in memory (`page_cache`)."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from engine_agent.engines.artifacts import CannotFetch
from engine_agent.engines.base import EngineUnavailable
from engine_agent.node.builds import NodeBuilds
from engine_agent.node.downloads import Downloads
from engine_agent.node.page_cache import PageCache
from engine_agent.node.weights import NodeWeights
from engine_agent.protocol.engine_builds import EngineBuild
from engine_agent.protocol.messages import Artifact, Prefetch
from engine_agent.protocol.telemetry_messages import NODE_ARTIFACTS_MAX, NodeArtifact, Prefetched

RETRY_S = 60.0
"""After a failed fetch, or the refusal of a build."""
NOTHING = Prefetch()


class Prefetching:
    def __init__(
        self,
        builds: NodeBuilds,
        weights: NodeWeights,
        downloads: Downloads,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._builds = builds
        self._weights = weights
        self._downloads = downloads
        self._now_s = now_s
        self.page_cache = PageCache(now_s)
        self._wanted = NOTHING
        self._kept: dict[str, int] = {}
        self._troubles: dict[str, tuple[str, float]] = {}

    def advance(self, wanted: Prefetch | None, *, is_spare: bool = False) -> None:
        """Starts to fetch the first thing that is missing, unless something is on its way. On a spare it also starts to
        read into memory what has arrived."""
        self._wanted = wanted or NOTHING
        if not is_spare:
            self.page_cache.keep({})
        elif not self._downloads.running:
            self.page_cache.keep(self._folders())
        digests = {each.digest for each in _each(self._wanted)}
        for digest in self._kept.keys() - digests:
            os.close(self._kept.pop(digest))
        self._troubles = {digest: known for digest, known in self._troubles.items() if digest in digests}
        if self._downloads.running:
            return
        for each in self._due():
            try:
                begun = self._take_build(each) if isinstance(each, EngineBuild) else self._take_weights(each)
            except (EngineUnavailable, CannotFetch) as error:
                self._troubles[each.digest] = (str(error)[:400], self._now_s() + RETRY_S)
                continue
            self._troubles.pop(each.digest, None)
            if begun:
                return

    def release(self) -> None:
        """Unlocks everything: an engine waits for a download, which may need the room. `advance` locks the rest."""
        while self._kept:
            os.close(self._kept.popitem()[1])

    def report(self) -> Prefetched:
        """Weights that are in a folder of this node are listed once an order names them."""
        artifacts = {each.digest: each for each in self._weights.report()}
        for artifact in self._wanted.artifacts:
            with contextlib.suppress(EngineUnavailable):
                if artifact.digest not in artifacts and self._weights.has(artifact):
                    artifacts[artifact.digest] = NodeArtifact(artifact.digest)
        artifacts = {
            digest: msgspec.structs.replace(each, memory_bytes=self.page_cache.bytes_in_memory(digest))
            for digest, each in artifacts.items()
        }
        troubles = {digest: text for digest, (text, _) in sorted(self._troubles.items())}
        return Prefetched(tuple(artifacts.values())[:NODE_ARTIFACTS_MAX], troubles)

    def _folders(self) -> dict[str, Path]:
        """Where complete weights of the order are, by digest."""
        found = dict[str, Path]()
        for artifact in self._wanted.artifacts:
            with contextlib.suppress(EngineUnavailable):
                if folder := self._weights.folder(artifact):
                    found[artifact.digest] = folder
        return found

    def _due(self) -> Iterator[EngineBuild | Artifact]:
        for each in _each(self._wanted):
            retry_at_s = self._troubles.get(each.digest, ("", 0.0))[1]
            if each.digest not in self._kept and self._now_s() >= retry_at_s:
                yield each

    def _take_build(self, build: EngineBuild) -> bool:
        held = self._builds.obtain(build)
        if held is not None:
            self._kept[build.digest] = held.lock
        return held is None

    def _take_weights(self, artifact: Artifact) -> bool:
        if (lock := self._weights.hold(artifact)) is not None:
            self._kept[artifact.digest] = lock
            return False
        if self._weights.has(artifact):
            return False
        self._weights.begin(artifact)
        return True


def _each(wanted: Prefetch) -> tuple[EngineBuild | Artifact, ...]:
    return (*wanted.builds, *wanted.artifacts)
