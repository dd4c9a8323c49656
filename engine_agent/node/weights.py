"""Weights of one node. The agent fetches those that are in a folder of the control plane's hosts, unless the node has
the same folder, and those in S3 in advance or if other nodes hold them; else the engine's launcher fetches those.
Engines read the agent's folder and cannot change it."""

import contextlib
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Annotated

import msgspec

from engine_agent.engines.artifacts import (
    LIMIT_VARIABLE,
    CannotFetch,
    Entry,
    acquire,
    bytes_in,
    entry_of,
    make_room,
    size_limit,
)
from engine_agent.engines.base import EngineUnavailable, is_fetched, local_folder
from engine_agent.engines.builds import store
from engine_agent.engines.s3_artifact import download, put_in_place
from engine_agent.node.downloads import Downloads, Fetch
from engine_agent.protocol.manifest import (
    DIGEST_PREFIX,
    MANIFEST_NAME,
    MOST_FILES,
    MOST_MANIFEST_BYTES,
    BadArtifact,
    Manifest,
    parse_manifest,
    wrong_list,
)
from engine_agent.protocol.messages import Artifact, EnginePlan, PlanAdapter
from engine_agent.protocol.telemetry_messages import NODE_ARTIFACTS_MAX, NodeArtifact

WEIGHTS = "weights"
"""Of the machine's cache, next to `fetched`. Engines cannot write to it."""
TRY_PEERS_EVERY_S = 60.0
"""A start has several passes."""
SIZES_NAME = "sizes.json"
"""Of the answer with the size of each file, while the files arrive."""


class NodeWeights:
    """`folder` belongs to the agent; `fetched` is the folder of the engines' launchers."""

    def __init__(self, folder: Path, fetched: Path, downloads: Downloads) -> None:
        self._folder = folder
        self._fetched = fetched
        self._downloads = downloads
        self._sizes: dict[Path, int] = {}
        self._coming: set[str] = set()
        self._tried_at_s: dict[str, float] = {}

    def obtain(self, plan: EnginePlan, kept: list[int], locks: contextlib.ExitStack) -> Mapping[str, Path] | None:
        """Returns the folders of the plan's weights that are in the agent's folder, by digest. The descriptors in
        `kept` keep them until `locks` closes. Starts to fetch those that the engine can get from nowhere else or from
        other nodes, and then returns None. Raises EngineUnavailable if a URI or digest is malformed, or a fetch failed;
        the next call tries again."""
        folders, missing = {}, []
        for artifact in dict.fromkeys(plan.artifacts):
            if self._is_on_node(artifact):
                continue
            if (lock := self.hold(artifact)) is not None:
                locks.callback(os.close, lock)
                kept.append(lock)
                folders[artifact.digest] = self._entry(artifact).folder
            elif not is_fetched(artifact) or self._may_be_held(artifact):
                missing.append(artifact)
        for artifact in missing[:]:
            try:
                self.begin(artifact, if_held=is_fetched(artifact))
            except CannotFetch as error:
                if not is_fetched(artifact):
                    raise EngineUnavailable(str(error)) from None
                missing.remove(artifact)
        return None if missing else folders

    def _may_be_held(self, artifact: Artifact) -> bool:
        """Whether to ask for nodes with weights in S3 before the engine's launcher fetches them."""
        tried_at_s = self._tried_at_s.get(artifact.digest, -TRY_PEERS_EVERY_S)
        is_due = monotonic() - tried_at_s >= TRY_PEERS_EVERY_S
        return is_due and not self._entry(artifact, self._fetched).is_complete

    def has(self, artifact: Artifact) -> bool:
        """Whether an engine of this node can load it now, or its launcher has fetched it. Raises EngineUnavailable as
        `obtain` does."""
        return self.folder(artifact) is not None

    def folder(self, artifact: Artifact) -> Path | None:
        """Returns where its complete files are; None if they are not on the node. Raises EngineUnavailable as `obtain`
        does."""
        if is_fetched(artifact) and (fetched := self._entry(artifact, self._fetched)).is_complete:
            return fetched.folder
        if self._is_on_node(artifact):
            return local_folder(artifact, self._fetched)
        own = self._entry(artifact)
        return own.folder if own.is_complete else None

    def hold(self, artifact: Artifact) -> int | None:
        """Returns the descriptor of a lock that keeps complete weights in the agent's folder; None if there are none.
        Raises EngineUnavailable if they cannot be read."""
        try:
            return store.hold(self._entry(artifact))
        except OSError as error:
            raise EngineUnavailable(f"{_name(artifact)} cannot be read: {error}") from error

    def begin(self, artifact: Artifact, *, if_held: bool = False) -> None:
        """Starts to fetch weights into the agent's folder unless they are on their way. Raises CannotFetch if the last
        fetch of them failed. `if_held`: only if other nodes hold them."""
        self._coming.add(artifact.digest)
        fill = partial(self._acquire, artifact, self._entry(artifact), if_held)
        self._downloads.begin(artifact.digest, _name(artifact), fill)

    def report(self) -> tuple[NodeArtifact, ...]:
        """The weights of this machine that were fetched, and those that this node is fetching."""
        coming = {fetch.digest: fetch.words() for fetch in self._downloads.running if fetch.digest in self._coming}
        peer_bytes = self._downloads.peer_bytes
        found = {each: NodeArtifact(each, 0, words[:200], True, peer_bytes(each)) for each, words in coming.items()}
        for folder in (self._folder, self._fetched):
            with contextlib.suppress(OSError):
                for entry in store.entries(folder):
                    digest = f"{DIGEST_PREFIX}{entry.hex_digest}"
                    if entry.is_complete:
                        offered = folder == self._folder or (digest in found and found[digest].is_offered)
                        found[digest] = NodeArtifact(digest, self._stored_bytes(entry), "", offered, peer_bytes(digest))
        return tuple(found[digest] for digest in sorted(found)[:NODE_ARTIFACTS_MAX])

    def _stored_bytes(self, entry: Entry) -> int:
        if entry.folder not in self._sizes:
            self._sizes[entry.folder] = bytes_in(entry.folder)
        return self._sizes[entry.folder]

    def _is_on_node(self, artifact: Artifact) -> bool:
        """Whether the node has the folder that its URI names."""
        return not is_fetched(artifact) and (local_folder(artifact, self._fetched) / MANIFEST_NAME).is_file()

    def _entry(self, artifact: Artifact, folder: Path | None = None) -> Entry:
        try:
            return entry_of(artifact.digest, folder or self._folder)
        except ValueError as error:
            raise EngineUnavailable(f"{_name(artifact)} cannot be fetched: {error}") from error

    def _acquire(self, artifact: Artifact, entry: Entry, if_held: bool, fetch: Fetch) -> None:
        try:
            if not if_held or self._downloads.is_held(fetch):
                self._fill(artifact, entry, fetch)
        finally:
            self._tried_at_s[artifact.digest] = monotonic()

    def _fill(self, artifact: Artifact, entry: Entry, fetch: Fetch) -> None:
        limit = size_limit(os.environ.get(LIMIT_VARIABLE, ""))

        def fill() -> None:
            entry.partial.mkdir(mode=0o700, exist_ok=True)
            if is_fetched(artifact):
                room, first = partial(make_room, entry, limit=limit), partial(self._downloads.files_of_peers, fetch)
                download(artifact, entry, room, fetch.arrived, lambda _: None, first)
            else:
                self._download(artifact, entry, fetch, limit)
            _make_readable(entry.folder)

        os.close(acquire(entry, fill, lambda: None))

    def _download(self, artifact: Artifact, entry: Entry, fetch: Fetch, limit: int | None) -> None:
        """Completes the entry from the control plane; each file is checked. Raises CannotFetch if the control plane has
        no such weights, they do not arrive, or the disk is too small."""
        url, files = f"/agents/artifacts/{entry.hex_digest}", entry.partial / "files"
        files.mkdir(mode=0o700, exist_ok=True)
        listed = entry.partial / SIZES_NAME
        self._downloads.file(fetch, url, listed, MOST_MANIFEST_BYTES)
        sizes = _parse_sizes(listed.read_bytes(), fetch.name)
        text_file = entry.partial / MANIFEST_NAME
        self._downloads.file(fetch, f"{url}/{MANIFEST_NAME}", text_file, MOST_MANIFEST_BYTES)
        text = text_file.read_bytes()
        manifest = _check_manifest(text, artifact, fetch.name)
        if sizes.keys() != manifest.files.keys():
            raise CannotFetch(f"{fetch.name}: the control plane has other files than its {MANIFEST_NAME} lists")
        make_room(entry, sum(sizes.values()), limit)
        fetch.arrived.total = sum(sizes.values())
        self._downloads.files(fetch, url, files, manifest.files, sizes)
        put_in_place(entry, manifest, text)


def local_plan(plan: EnginePlan, folders: Mapping[str, Path]) -> EnginePlan:
    """The plan with the folders of its weights on this node."""

    def here(artifact: Artifact | None) -> Artifact | None:
        folder = folders.get(artifact.digest) if artifact is not None else None
        return artifact if artifact is None or folder is None else Artifact(folder.as_uri(), artifact.digest)

    adapters = tuple(PlanAdapter(each.name, here(each.artifact)) for each in plan.adapters)
    return msgspec.structs.replace(plan, artifact=here(plan.artifact), draft=here(plan.draft), adapters=adapters)


def _name(artifact: Artifact) -> str:
    return f"artifact {artifact.uri}"


def _parse_sizes(text: bytes, name: str) -> dict[str, int]:
    try:
        sizes = msgspec.json.decode(text, type=dict[str, Annotated[int, msgspec.Meta(ge=0)]])
    except msgspec.DecodeError as error:
        raise CannotFetch(f"{name}: the control plane's list of sizes is malformed: {error}") from None
    return sizes


def _check_manifest(text: bytes, artifact: Artifact, name: str) -> Manifest:
    try:
        manifest = parse_manifest(text, f"the manifest of {name}")
    except BadArtifact as error:
        raise CannotFetch(str(error)) from None
    if manifest.digest != artifact.digest:
        raise CannotFetch(f"{name} has the digest {manifest.digest}, but the order says {artifact.digest}")
    if wrong := wrong_list(manifest, MOST_FILES):
        raise CannotFetch(f"the manifest of {name} {wrong}")
    return manifest


def _make_readable(folder: Path) -> None:
    """Engines have their own account and read the weights; only this account may change them."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
