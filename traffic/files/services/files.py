"""Stores and deletes files of applications. The bytes are written before the row and deleted after it, so a process
that dies in between leaves bytes without a row; garbage collection deletes them a day later."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from django.conf import settings as django_settings

from fleet.clouds.planning.upkeep import FILES as POLICY
from fleet.clouds.planning.upkeep import Resource, ResourceKind
from fleet.clouds.services.garbage import GarbageSource, garbage_collect
from traffic.batches.models import OPEN_STATES, Batch, StoredFile, new_file_id
from traffic.batches.selectors import stored_file_of, stored_of_tenant
from traffic.batches.services.batch import BATCHES
from traffic.files.planner import FilePurpose, FileSettings, file_not_found, first_model
from traffic.files.services.store import FileStore, FileWriter, file_store
from traffic.tenants.planner import ApplicationRefused
from traffic.tenants.selectors import Application

FILES = "files"
FORGOTTEN_AT_ONCE = 500
FIRST_BYTES = 1024 * 1024
"""Read to find the model of a file's first line."""


def stored_name(file_id: str) -> str:
    return f"{FILES}/{file_id}"


class Upload:
    """An upload in progress; the file is invisible until `finish`."""

    def __init__(self, settings: FileSettings) -> None:
        self.id = new_file_id()
        self._settings = settings
        self._writer: FileWriter = file_store().write(stored_name(self.id))
        self._first = bytearray()
        self._lines = 0

    def write(self, piece: bytes) -> None:
        """Raises ApplicationRefused if the file is too large. Raises StoreAway if the store cannot be written."""
        most = self._settings.max_bytes
        if self._writer.bytes + len(piece) > most:
            raise ApplicationRefused(413, "file_too_large", f"a file may have at most {most} bytes", "file")
        self._writer.write(piece)
        self._lines += piece.count(b"\n")
        if len(self._first) < FIRST_BYTES and b"\n" not in self._first:
            self._first += piece[:FIRST_BYTES]

    def finish(
        self, *, application: Application, filename: str, purpose: FilePurpose, expires_at: datetime, now: datetime
    ) -> StoredFile:
        """Commits the file and its row. Raises ApplicationRefused if it is empty, or the tenant has reached a limit.
        Raises StoreAway if the store cannot be written."""
        if not self._writer.bytes:
            raise ApplicationRefused(400, "empty_file", "the file is empty", "file")
        room_check(application.tenant, self._writer.bytes, self._settings)
        self._writer.commit()
        return StoredFile.objects.create(
            id=self.id,
            tenant=application.tenant,
            key=application.key,
            filename=filename,
            purpose=purpose.value,
            bytes=self._writer.bytes,
            lines=self._lines,
            model=first_model(bytes(self._first)),
            sha256=self._writer.sha256,
            created_at=now,
            expires_at=expires_at,
        )

    def abort(self) -> None:
        self._writer.abort()


def room_check(tenant: str, size: int, settings: FileSettings) -> None:
    """Raises ApplicationRefused if `size` more bytes would exceed the tenant's limits."""
    files, stored = stored_of_tenant(tenant)
    if files >= settings.max_files_per_tenant or stored + size > settings.max_bytes_per_tenant:
        message = (
            f"you may have {settings.max_files_per_tenant} files with {settings.max_bytes_per_tenant} bytes and have "
            f"{files} with {stored}: delete some"
        )
        raise ApplicationRefused(400, "storage_limit_exceeded", message)


def stored_file_delete(*, application: Application, file_id: str, now: datetime) -> StoredFile:
    """Deletes a file. Batches keep what they have read of it. Raises ApplicationRefused if the tenant has no such
    file."""
    file = stored_file_of(application.tenant, file_id, now)
    if file is None:
        raise file_not_found(file_id)
    StoredFile.objects.filter(id=file.id).delete()
    file_store().delete(stored_name(file.id))
    return file


def stored_files_trim(*, now: datetime) -> int:
    """Deletes expired files. Returns the number of rows."""
    ids = list(StoredFile.objects.filter(expires_at__lte=now).values_list("id", flat=True)[:FORGOTTEN_AT_ONCE])
    StoredFile.objects.filter(id__in=ids).delete()
    store = file_store()
    for file_id in ids:
        store.delete(stored_name(file_id))
    return len(ids)


def file_garbage_collect(*, now: datetime) -> None:
    """Deletes old unfinished uploads, files without a row, and folders of batches that are not open."""
    store = file_store()
    store.delete_unfinished((now - timedelta(seconds=POLICY.grace_period_s)).timestamp())
    files = _old_names(store, FILES, now)
    rows = StoredFile.objects.filter(id__in=list(files)).values_list("id", flat=True)
    _delete_unreferenced(FILES, files, set(rows), store.delete, now)
    folders = _old_names(store, BATCHES, now)
    working = Batch.objects.filter(id__in=list(folders), state__in=OPEN_STATES).values_list("id", flat=True)
    _delete_unreferenced(BATCHES, folders, set(working), store.delete_folder, now)


def _old_names(store: FileStore, folder: str, now: datetime) -> dict[str, datetime]:
    """IDs with the time of the last write. Recent names are skipped, since their rows may be written last."""
    written = {name.rpartition("/")[2]: datetime.fromtimestamp(at, UTC) for name, at in store.names(folder)}
    return {name: at for name, at in written.items() if POLICY.is_over(at, now)}


def _delete_unreferenced(
    folder: str, names: dict[str, datetime], referenced: set[str], delete: Callable[[str], None], now: datetime
) -> None:
    def delete_all(garbage: Sequence[Resource]) -> Iterable[Resource]:
        for one in garbage:
            delete(f"{folder}/{one.id}")
            yield one

    found = [Resource(ResourceKind.FILE, name, name in referenced, created_at=at) for name, at in names.items()]
    garbage_collect(GarbageSource(folder, POLICY, found, delete_all), now)


def file_settings() -> FileSettings:
    return replace(FileSettings(), max_bytes=django_settings.FILE_MAX_BYTES)
