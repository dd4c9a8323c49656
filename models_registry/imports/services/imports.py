"""Creates, claims, updates and ends imports. Each change of state is compare-and-set with its event in the same
transaction. It never opens a connection to a hub: the runner does."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import Q, QuerySet, Sum

from engine_agent.protocol.manifest import BadArtifact
from kernel import live
from kernel.events import event_record
from kernel.refusals import Conflict, InvalidInput, Refusal
from kernel.transitions import compare_and_set
from models_registry.artifacts.planner import Place, check_source, parse_place
from models_registry.imports.models import ImportFile, ModelImport
from models_registry.imports.planner import (
    IMPORT_OPEN,
    IMPORT_TONE,
    CannotImport,
    ImportLimits,
    ImportState,
    ListedFile,
    Snapshot,
    is_reference,
    parse_source,
    retry_after_s,
    usual_engine,
)
from models_registry.imports.services.hub import hub_access
from models_registry.versions.models import Model
from models_registry.versions.planning.engine_arguments import ENGINES, WITH_MEDIA
from models_registry.versions.planning.spec import one_of
from models_registry.versions.services.drafts import draft_create, model_create

STORED = "verified and stored"
MOST_OPEN = 20
LEASE_S = 15.0
KEPT = timedelta(days=7)
"""How long the unfinished files of a failed import are kept for a retry."""
_OPEN = [state.value for state in IMPORT_OPEN]


def import_limits() -> ImportLimits:
    return ImportLimits(bytes=settings.ARTIFACT_MAX_GIB * 1024**3, pickles=settings.IMPORT_PICKLES)


def import_store() -> Place:
    """Where imports are stored. Raises CannotImport if that is not configured, or no artifact may be read there."""
    if not settings.IMPORT_STORE:
        raise CannotImport("SWITCHYARD_ARTIFACT_SOURCES is empty: name a folder or bucket for models there")
    try:
        place = parse_place(settings.IMPORT_STORE)
        check_source(place, map(parse_place, settings.ARTIFACT_SOURCES))
    except BadArtifact as error:
        raise CannotImport(f"SWITCHYARD_IMPORT_STORE: {error}") from None
    return place


def import_start(
    *, source: str, pattern: str = "", draft: str = "", engine: str = "", actor: str, now: datetime
) -> ModelImport:
    """Queue an import. Raises InvalidInput for a source, draft or engine that cannot be used. Raises Conflict if the
    same import or too many are open."""
    try:
        repository = parse_source(source)
        hub_access(repository.hub)
        import_store()
    except CannotImport as wrong:
        raise InvalidInput(field="source", rule="readable", message=str(wrong)) from None
    _check_draft_name(draft)
    if engine and engine not in ENGINES:
        raise InvalidInput(field="engine", rule="choice", message=f"engine is {engine!r}; {one_of(ENGINES, engine)}")
    with transaction.atomic():
        running = ModelImport.objects.filter(state__in=_OPEN)
        if same := running.filter(source=str(repository), pattern=pattern).first():
            raise Conflict(f"{same} is {same.state} already")
        if running.count() >= MOST_OPEN:
            raise Conflict(f"{MOST_OPEN} imports are waiting or running; cancel one or wait")
        row = ModelImport.objects.create(
            source=str(repository),
            pattern=pattern,
            draft=draft,
            engine=engine,
            actor=actor[:64],
            created_at=now,
            due_at=now,
            reason="waits for a process `jobs`",
        )
        _record(row, ImportState.QUEUED, f"{row} requested by {actor}", actor, now)
    return row


def _check_draft_name(draft: str) -> None:
    if draft and not is_reference(draft):
        message = f"draft is {draft!r}; it must be MODEL@VERSION, such as llama@1: letters, digits, - _ and ."
        raise InvalidInput(field="draft", rule="name", message=message)


def import_cancel(*, import_id: int, actor: str, now: datetime) -> ModelImport:
    """Cancel an import and drop its unfinished files. Raises Conflict if it has ended."""
    row = ModelImport.objects.get(pk=import_id)
    if not _move(row, IMPORT_OPEN, ImportState.CANCELLED, f"cancelled by {actor}", actor, now):
        raise Conflict(f"{row} has ended")
    row.refresh_from_db()
    return row


def import_retry(*, import_id: int, actor: str, now: datetime) -> ModelImport:
    """Queue a failed or cancelled import again; verified files are kept. Raises Conflict in other states."""
    row = ModelImport.objects.get(pk=import_id)
    ended = frozenset({ImportState.FAILED, ImportState.CANCELLED})
    again = {"due_at": now, "troubles": 0, "ended_at": None}
    if not _move(row, ended, ImportState.QUEUED, f"queued again by {actor}", actor, now, **again):
        raise Conflict(f"{row} is {row.state}; only a failed or cancelled import can be retried")
    row.refresh_from_db()
    return row


def imports_due(now: datetime) -> "QuerySet[ModelImport]":
    return ModelImport.objects.filter(state__in=_OPEN, due_at__lte=now)


def import_claim(*, now: datetime, but: Sequence[int] = ()) -> ModelImport | None:
    """Lease the import that waits longest."""
    with transaction.atomic():
        due = imports_due(now).exclude(pk__in=but).select_for_update(skip_locked=True)
        row = due.order_by("due_at", "id").first()
        if row is None:
            return None
        row.fence += 1
        row.due_at, row.is_staged = now + timedelta(seconds=LEASE_S), True
        row.save(update_fields=["fence", "due_at", "is_staged"])
        if row.state == ImportState.QUEUED:
            queued = frozenset({ImportState.QUEUED})
            _move(row, queued, ImportState.RUNNING, "asks the hub for its files", row.actor, now)
            row.refresh_from_db()
    return row


def import_release(row: ModelImport, *, due_at: datetime) -> None:
    """Let any process claim it from then on."""
    _leased(row).update(due_at=due_at)


def import_note(row: ModelImport, *, now: datetime, **columns: Any) -> bool:
    """Store progress and extend the lease. Returns False if the lease was lost, or the import has ended."""
    kept = _leased(row).update(due_at=now + timedelta(seconds=LEASE_S), **columns)
    if kept:
        live.push("imports", str(row.pk))
    return bool(kept)


def import_pin(row: ModelImport, snapshot: Snapshot, files: Sequence[ListedFile], *, now: datetime) -> bool:
    """Store the commit and the files to fetch, which then stay. Returns False if the lease was lost."""
    columns = {
        "revision": snapshot.revision,
        "license": snapshot.license,
        "tags": list(snapshot.tags),
        "files_total": len(files),
        "bytes_total": sum(file.size for file in files),
    }
    with transaction.atomic():
        if not import_note(row, now=now, reason="fetches files", **columns):
            return False
        row.files.all().delete()
        ImportFile.objects.bulk_create(
            ImportFile(
                model_import=row,
                path=file.path,
                size=file.size,
                sha256=file.sha256,
                blob=file.blob,
                revision=file.revision,
            )
            for file in files
        )
    return True


def import_file_stored(row: ModelImport, path: str, sha256: str, *, now: datetime) -> bool:
    with transaction.atomic():
        done = row.files.exclude(stored="").count() + 1
        if not import_note(row, now=now, files_done=done, troubles=0):
            return False
        row.files.filter(path=path).update(stored=sha256)
    return True


def import_bytes_to_come(row: ModelImport) -> int:
    """Bytes that other running imports have yet to write."""
    others = ModelImport.objects.filter(state=ImportState.RUNNING.value).exclude(pk=row.pk)
    sums = others.aggregate(total=Sum("bytes_total"), done=Sum("bytes_done"))
    return max(0, (sums["total"] or 0) - (sums["done"] or 0))


def import_fail(row: ModelImport, reason: str, *, now: datetime) -> None:
    _move(row, IMPORT_OPEN, ImportState.FAILED, reason[:1000], row.actor, now, fence=row.fence)


def import_note_trouble(row: ModelImport, reason: str, *, now: datetime) -> None:
    """Delay the import, or end it after too many failures without progress."""
    with transaction.atomic():
        current = _leased(row).select_for_update().first()
        if current is None:
            return
        wait_s = retry_after_s(current.troubles + 1)
        if wait_s is None:
            import_fail(row, f"{reason}; gave up after {current.troubles + 1} tries. Retry to continue", now=now)
            return
        _leased(row).update(
            troubles=current.troubles + 1,
            due_at=now + timedelta(seconds=wait_s),
            reason=f"{reason}; next try in {wait_s:g} s"[:1000],
            bytes_per_s=0,
        )
        live.push("imports", str(row.pk))


def import_finish(row: ModelImport, *, uri: str, digest: str, found: Mapping[str, Any], now: datetime) -> bool:
    """Register the artifact, and draft the requested version. `found`: as `draft_numbers` returns it. Returns False if
    the lease was lost."""
    columns = {
        "artifact_uri": uri,
        "artifact_digest": digest,
        "configuration": dict(found),
        "bytes_done": row.bytes_total,
        "files_done": row.files_total,
        "is_staged": False,
        "fence": row.fence,
    }
    with transaction.atomic():
        if not _move(row, IMPORT_OPEN, ImportState.DONE, STORED, row.actor, now, **columns):
            return False
    row.refresh_from_db()
    if row.draft:
        try:
            import_draft(import_id=row.pk, draft=row.draft, engine=row.engine, actor=row.actor, now=now)
        except Refusal as refusal:
            _note_reason(row, f"{STORED}; {row.draft} was not drafted: {refusal}")
    return True


def import_draft(*, import_id: int, draft: str, engine: str = "", actor: str, now: datetime) -> str:
    """Draft `model@version` that serves the imported artifact, with the model's numbers. Creates the model if needed.
    Returns its name. Raises Conflict if the import is not done or the version exists. Raises InvalidInput for names."""
    row = ModelImport.objects.get(pk=import_id)
    if row.state != ImportState.DONE:
        raise Conflict(f"{row} is {row.state}; it can be drafted once it is done")
    if not draft:
        raise InvalidInput(field="draft", rule="required", message="draft is empty; it must be MODEL@VERSION")
    _check_draft_name(draft)
    model, _, version = draft.partition("@")
    known: Mapping[str, Any] = row.configuration
    names = ("attention_heads", "kv_heads", "layers", "context_length", "modalities")
    columns = {name: known[name] for name in names if name in known}
    columns |= {
        "engine": engine or usual_engine(file.path for file in row.files.all()),
        "artifact_uri": row.artifact_uri,
        "artifact_digest": row.artifact_digest,
    }
    if columns["engine"] not in WITH_MEDIA:
        columns.pop("modalities", None)
    with transaction.atomic():
        if not Model.objects.filter(name=model).exists():
            model_create(name=model, description=f"{row.repository().name}, {row.license or 'no licence stated'}",
                         actor=actor, now=now)  # fmt: skip
        draft_create(model=model, version=version, based_on="", columns=columns, actor=actor, now=now)
    _note_reason(row, f"{STORED}; drafted as {draft}")
    return draft


def _note_reason(row: ModelImport, reason: str) -> None:
    ModelImport.objects.filter(pk=row.pk).update(reason=reason[:1000])
    live.push("imports", str(row.pk))


def imports_abandoned(now: datetime) -> "QuerySet[ModelImport]":
    """Imports whose unfinished files are not needed any more."""
    old = Q(state=ImportState.FAILED.value, ended_at__lt=now - KEPT)
    return ModelImport.objects.filter(Q(state=ImportState.CANCELLED.value) | old, is_staged=True)


def _leased(row: ModelImport) -> "QuerySet[ModelImport]":
    return ModelImport.objects.filter(pk=row.pk, fence=row.fence, state__in=_OPEN)


def _move(
    row: ModelImport,
    seen: frozenset[ImportState],
    to: ImportState,
    reason: str,
    actor: str,
    now: datetime,
    **columns: Any,
) -> bool:
    """`fence` in `columns`: only if this lease is still the newest."""
    rows = ModelImport.objects.filter(pk=row.pk, state__in=[state.value for state in seen])
    if "fence" in columns:
        rows = rows.filter(fence=columns["fence"])
    columns = {"bytes_per_s": 0, "ended_at": None if to in IMPORT_OPEN else now, **columns}
    event = {
        "kind": f"import.{to}",
        "message": f"{row} is {to}: {reason}",
        "tone": IMPORT_TONE[to],
        "actor": actor[:64],
        "detail": {"import": row.pk, "source": row.source},
    }
    moved = compare_and_set(rows, event=event, now=now, state=to.value, reason=reason, **columns)
    if moved:
        live.push("imports", str(row.pk))
    return moved


def _record(row: ModelImport, to: ImportState, message: str, actor: str, now: datetime) -> None:
    event_record(
        kind=f"import.{to}",
        message=message,
        tone=IMPORT_TONE[to],
        now=now,
        actor=actor[:64],
        detail={"import": row.pk, "source": row.source},
    )
    live.push("imports", str(row.pk))
