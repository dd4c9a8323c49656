"""Runs imports in process `jobs`: lists the repository, downloads several files in parallel, stores each once it is
verified, and registers the artifact. It may be killed between any two lines: the next process continues from the rows
and from the parts on disk.

One thread has the database connection; it notes progress and extends the lease while other threads download."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from threading import Event
from time import monotonic
from typing import Any, TypeVar

from engine_agent.protocol.manifest import BadArtifact, Manifest
from engine_agent.protocol.messages import Artifact
from kernel import clock
from kernel.lease_loop import LeaseLoop, in_thread
from models_registry.artifacts.planner import ArtifactLimits, parse_place
from models_registry.artifacts.services.sources import SourceTrouble, artifact_open
from models_registry.imports.models import ImportFile, ModelImport
from models_registry.imports.planner import (
    CannotImport,
    ListedFile,
    choose_files,
    draft_numbers,
)
from models_registry.imports.services.download import Halted, download
from models_registry.imports.services.hub import Hub, HubTrouble, hub_open
from models_registry.imports.services.imports import (
    import_bytes_to_come,
    import_claim,
    import_fail,
    import_file_stored,
    import_finish,
    import_limits,
    import_note,
    import_note_trouble,
    import_pin,
    import_release,
    import_store,
    imports_abandoned,
    imports_due,
)
from models_registry.imports.services.store import ImportStore, check_same, staging_of, store_of
from models_registry.versions.planning.checkpoint import (
    CONFIG_BYTES_MAX,
    CONFIG_NAME,
    UnreadableCheckpoint,
    read_checkpoint,
    stated_modalities,
)
from models_registry.versions.services.validation import checkpoint_store

AT_ONCE = 2
FILES_AT_ONCE = 4
NOTE_EVERY_S = 1.0
HELD_RETRY_S = 3.0
T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ImportPace:
    poll_s: float = 0.5
    quiet_poll_s: float = 2.0
    quiet_after_s: float = 30.0
    renew_every_s: float = 3600.0
    """Unused: the work itself extends its lease."""


class ModelImporter(LeaseLoop[ModelImport]):
    name = "models_registry.imports"

    def __init__(self, pace: ImportPace | None = None, now: Callable[[], datetime] = clock.now) -> None:
        super().__init__(pace or ImportPace(), now)

    def is_open(self, now: datetime) -> bool:
        return imports_due(now).exists() or imports_abandoned(now).exists()

    def claim(self, now: datetime) -> list[ModelImport]:
        _sweep(now)
        claimed: list[ModelImport] = []
        while len(self.running) + len(claimed) < AT_ONCE:
            row = import_claim(now=now, but=[row.pk for row in (*self.running, *claimed)])
            if row is None:
                break
            claimed.append(row)
        return claimed

    def release(self, leased: ModelImport, now: datetime) -> None:
        import_release(leased, due_at=now)

    async def work(self, leased: ModelImport) -> None:
        halt = Event()
        try:
            await in_thread(partial(ImportWork(leased, halt, self._now).run), is_long=True)
        except asyncio.CancelledError:
            halt.set()
            raise


def _sweep(now: datetime) -> None:
    """Remove the unfinished files of cancelled and old failed imports."""
    try:
        root = import_store()
    except CannotImport:
        return
    for row in imports_abandoned(now):
        staging = staging_of(row, root)
        with staging.held() as is_held:
            if is_held and imports_abandoned(now).filter(pk=row.pk).update(is_staged=False):
                staging.remove()


class _Lost(Exception):
    """The import was cancelled, or another process has its lease."""


class ImportWork:
    """One lease of an import."""

    def __init__(self, row: ModelImport, halt: Event, now: Callable[[], datetime] = clock.now) -> None:
        self._row, self._halt, self._now = row, halt, now
        self._bytes: dict[str, int] = {}
        self._noted: tuple[float, int] | None = None

    def run(self) -> None:
        """Continue the import until it is done, cannot continue, or is halted. Records the outcome."""
        row = self._row
        try:
            with staging_of(row, import_store()).held() as is_held:
                if not is_held:
                    import_release(row, due_at=self._now() + timedelta(seconds=HELD_RETRY_S))
                    return
                self._run_held()
        except (_Lost, Halted):
            log.info("%s stops here", row)
        except (CannotImport, BadArtifact) as error:
            import_fail(row, str(error), now=self._now())
        except (HubTrouble, SourceTrouble) as trouble:
            import_note_trouble(row, str(trouble), now=self._now())
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            import_note_trouble(row, f"{where}{error.strerror or error}", now=self._now())

    def _run_held(self) -> None:
        row = self._row
        with hub_open(row.repository().hub) as hub, ThreadPoolExecutor(FILES_AT_ONCE, "import") as pool:
            try:
                if not row.files.exists():
                    self._list(hub, pool)
                store = store_of(row, import_store())
                self._fetch_all(hub, pool, store)
            finally:
                self._halt.set()
                pool.shutdown(wait=True, cancel_futures=True)
        store.staging.remove()

    def _list(self, hub: Hub, pool: ThreadPoolExecutor) -> None:
        row, limits = self._row, import_limits()
        snapshot = self._result(pool.submit(hub.snapshot, row.repository(), limits))
        files = choose_files(snapshot.files, row.pattern, limits)
        if not import_pin(row, snapshot, files, now=self._now()):
            raise _Lost
        row.refresh_from_db()

    def _fetch_all(self, hub: Hub, pool: ThreadPoolExecutor, store: ImportStore) -> None:
        row = self._row
        files = list(row.files.all())
        if (manifest := store.finished()) is not None:
            check_same(manifest, {file.path: file.stored or file.sha256 for file in files}, store.uri)
            self._finish(store, manifest)
            return
        missing = [file for file in files if not (file.stored and store.holds(file.path, file.stored, file.size))]
        self._bytes = {file.path: file.size for file in files if file not in missing}
        self._bytes |= {file.path: min(file.size, store.staging.part_bytes(file.path)) for file in missing}
        store.staging.check_room(_needed(missing, self._bytes, store) + import_bytes_to_come(row))
        fetches = {pool.submit(self._fetch, hub, store, file): file for file in missing}
        for fetch in self._as_completed(fetches):
            fetches[fetch].stored = fetch.result()
            if not import_file_stored(row, fetches[fetch].path, fetches[fetch].stored, now=self._now()):
                raise _Lost
        source = {"repository": row.source, "revision": row.revision, "license": row.license}
        manifest = Manifest({file.path: file.stored for file in files}, source)
        store.finish(manifest)
        self._finish(store, manifest)

    def _finish(self, store: ImportStore, manifest: Manifest) -> None:
        found = dict[str, Any]()
        if CONFIG_NAME in manifest.files:
            try:
                config = store.read(CONFIG_NAME, CONFIG_BYTES_MAX)
                found = {"modalities": modalities} if (modalities := stated_modalities(config)) else {}
                found |= draft_numbers(read_checkpoint(config, ()).shape)
            except UnreadableCheckpoint as error:
                log.warning("%s: %s", self._row, error)
        if not import_finish(self._row, uri=store.uri, digest=manifest.digest, found=found, now=self._now()):
            raise _Lost
        self._read_dimensions(store.uri, manifest.digest)

    def _read_dimensions(self, uri: str, digest: str) -> None:
        """Its dimensions let pages propose how to serve it. Validation reads them again if this fails."""
        limits = ArtifactLimits(artifact_bytes=import_limits().bytes)
        try:
            checkpoint_store(artifact_open(Artifact(uri, digest), (parse_place(uri),), limits), self._now())
        except (BadArtifact, SourceTrouble) as error:
            log.warning("%s: %s", self._row, error)

    def _fetch(self, hub: Hub, store: ImportStore, file: ImportFile) -> str:
        """In a thread without a database connection."""
        if store.is_known(file.path, file.sha256):
            return file.sha256
        listed = ListedFile(file.path, file.size, file.sha256, file.blob, file.revision)
        sha256 = download(
            hub,
            self._row.repository(),
            self._row.revision,
            listed,
            store.staging.part(file.path),
            halt=self._halt,
            progress=partial(self._bytes.__setitem__, file.path),
        )
        store.put(file.path, sha256, file.size)
        return sha256

    def _result(self, future: "Future[T]") -> T:
        next(iter(self._as_completed([future])))
        return future.result()

    def _as_completed(self, futures: "Iterable[Future[T]]") -> "Iterable[Future[T]]":
        """The futures as they end. Notes progress meanwhile."""
        left = set(futures)
        while left:
            done, left = wait(left, timeout=NOTE_EVERY_S, return_when=FIRST_COMPLETED)
            self._note()
            yield from done

    def _note(self) -> None:
        """Raises _Lost if the lease was lost, Halted if the process stops."""
        if self._halt.is_set():
            raise Halted
        now_s, fetched = monotonic(), sum(list(self._bytes.values()))
        if self._noted and now_s - self._noted[0] < NOTE_EVERY_S:
            return
        rate = (fetched - self._noted[1]) / (now_s - self._noted[0]) if self._noted else 0.0
        self._noted = now_s, fetched
        if not import_note(self._row, now=self._now(), bytes_done=fetched, bytes_per_s=max(0.0, rate)):
            raise _Lost


def _needed(missing: list[ImportFile], fetched: dict[str, int], store: ImportStore) -> int:
    """Bytes that the staging folder's disk must take."""
    left = sorted((file.size - fetched[file.path] for file in missing), reverse=True)
    return sum(left) if store.keeps_staged else sum(left[:FILES_AT_ONCE])
