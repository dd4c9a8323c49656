"""Validates drafts: reads their artifacts, compares them with their digests, and moves those that match to `validated`.
The work is done in slices: each task takes the lease, reads some files and stores their digests, so that a crash
repeats one file and no worker is blocked for long. It never reads an artifact inside a transaction. The draft is judged
first, and the verdict applies only to that revision."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db import IntegrityError, transaction

from engine_agent.protocol.manifest import BadArtifact
from kernel import clock, live, wake_ups
from kernel.events import event_record
from kernel.leases import lease_release, lease_take, this_holder
from kernel.refusals import Conflict
from kernel.tones import Tone
from models_registry.artifacts.planner import ArtifactLimits, Place, size_words
from models_registry.artifacts.services.sources import (
    OpenArtifact,
    SourceTrouble,
    artifact_open,
    checkpoint_read,
    file_sha256,
)
from models_registry.builds.selectors import wrong_build
from models_registry.instance_types.selectors import instance_shapes
from models_registry.versions.models import CheckpointRecord, ModelVersion, Validation
from models_registry.versions.planning.checkpoint import CONFIG_NAME, UnreadableCheckpoint
from models_registry.versions.planning.lifecycle import (
    ValidationState,
    VersionEvaluation,
    VersionState,
    artifacts_of,
    evaluate_version,
)
from models_registry.versions.selectors import engine_allowances, stored_checkpoints
from models_registry.versions.services.drafts import draft_locked, version_move

TASK = "models_registry.validate"
LEASE = "model-validation"
LEASE_TTL_S = 30.0
"""Longer than S3's read timeout (`READ_TIMEOUT_S`); renewed with every stored file."""
NOTE_EVERY_S = 1.0
SLICE_S = 20.0
"""A slice starts no further file after this time, so that the worker is free for other tasks."""

log = logging.getLogger(__name__)


def validation_start(*, version_id: int, actor: str, now: datetime) -> Validation:
    """Start the validation of a draft; a later task stores the verdict. Raises Conflict if it is not a draft, is in
    use, or is being validated."""
    try:
        with transaction.atomic():
            version = draft_locked(version_id, "validate")
            started = Validation.objects.create(
                version=version, version_revision=version.revision, actor=actor, started_at=now, seen_at=now
            )
            _record(started, "started", f"{version} is being validated, requested by {actor}", Tone.MOVING, now)
            wake_ups.send(TASK)
    except IntegrityError:
        raise Conflict("the version is already being validated; wait for the verdict") from None
    return started


@dataclass
class Slice:
    """One slice of a validation. `clock_now` is read for leases, progress and limits."""

    sources: tuple[Place, ...]
    limits: ArtifactLimits
    clock_now: Callable[[], datetime] = clock.now
    slice_s: float = SLICE_S
    holder: str = field(default_factory=this_holder)
    begun_at: datetime = field(init=False)
    noted_at: datetime = field(init=False)

    def __post_init__(self) -> None:
        self.begun_at = self.noted_at = self.clock_now()

    def take(self) -> bool:
        """Take or renew the lease. Returns False while another worker holds it."""
        return lease_take(name=LEASE, holder=self.holder, ttl_s=LEASE_TTL_S, now=self.clock_now()) is not None

    def release(self) -> None:
        lease_release(name=LEASE, holder=self.holder, now=self.clock_now())

    @property
    def is_over(self) -> bool:
        return (self.clock_now() - self.begun_at).total_seconds() >= self.slice_s


class _TurnLost(Exception):
    """The validation has ended, or another worker has its lease."""


def validations_advance(turn: Slice) -> None:
    """Continue the oldest running validation unless another worker does, and wake the next slice."""
    if not turn.take():
        return
    try:
        running = Validation.objects.filter(state=ValidationState.RUNNING.value).select_related("version")
        validation = running.order_by("seen_at", "id").first()
        if validation is not None:
            goes_on = _advance(validation, turn)
            if goes_on and running.exists():
                wake_ups.send(TASK)
    except _TurnLost:
        log.warning("the validation has ended, or another worker has its lease; this one stops")
    finally:
        turn.release()


def _advance(validation: Validation, turn: Slice) -> bool:
    """Returns False if a source did not answer, so that the next try is delayed."""
    try:
        artifacts = _open_artifacts(validation, turn)
        if _read_files(validation, artifacts, turn):
            _mark_validated(validation, artifacts, turn.clock_now())
    except BadArtifact as error:
        _end_validation(validation, ValidationState.FAILED, str(error), turn.clock_now())
    except SourceTrouble as trouble:
        _note_trouble(validation, str(trouble), turn)
        return False
    return True


def _open_artifacts(validation: Validation, turn: Slice) -> list[OpenArtifact]:
    """The draft's artifacts with their manifests. Raises BadArtifact if an artifact or the draft itself is invalid.
    Raises SourceTrouble if a source does not answer."""
    version, limits = validation.version, turn.limits
    if version.state != VersionState.DRAFT or version.revision != validation.version_revision:
        raise BadArtifact("the draft was changed meanwhile; validate it again")
    if (turn.clock_now() - validation.started_at).total_seconds() > limits.validation_s:
        raise BadArtifact(f"not done after {limits.validation_s / 3600:g} h (SWITCHYARD_ARTIFACT_LIMIT_S)")
    _check_evaluation(version, [])
    opened = [artifact_open(artifact, turn.sources, limits) for artifact in artifacts_of(version.spec())]
    if [each for each in opened if checkpoint_store(each, turn.begun_at)] and not turn.take():
        raise _TurnLost
    _check_evaluation(version, opened)
    return opened


def _evaluated(version: ModelVersion, opened: list[OpenArtifact]) -> VersionEvaluation:
    """Against the facts of the opened artifacts: those under a URI may have changed since they were read last."""
    checkpoints = stored_checkpoints({(each.uri, each.manifest.digest) for each in opened})
    return evaluate_version(version.spec(engine_allowances()), instance_shapes(), checkpoints)


def _check_evaluation(version: ModelVersion, opened: list[OpenArtifact]) -> None:
    if objection := _evaluated(version, opened).objection or wrong_build(version.spec(engine_allowances())):
        raise BadArtifact(objection)


def checkpoint_store(artifact: OpenArtifact, now: datetime) -> bool:
    """Read and store the dimensions of an artifact, once. An artifact that is no readable checkpoint is stored with the
    reason: its memory is then not checked. Returns whether there are new facts. Raises SourceTrouble as
    `checkpoint_read` does."""
    rows = CheckpointRecord.objects.filter(uri=artifact.uri, digest=artifact.manifest.digest)
    if rows.exists():
        return False
    found, problem = None, f"it has no {CONFIG_NAME}"
    try:
        found = checkpoint_read(artifact)
    except UnreadableCheckpoint as error:
        problem = str(error)
    row = CheckpointRecord(uri=artifact.uri, digest=artifact.manifest.digest, read_at=now)
    row.facts, row.problem = (found.as_json(), "") if found is not None else ({}, problem)
    CheckpointRecord.objects.bulk_create([row], ignore_conflicts=True)
    return found is not None


def _read_files(validation: Validation, artifacts: list[OpenArtifact], turn: Slice) -> bool:
    """Read the remaining files. Returns False if the slice ended first."""
    validation.files_total = sum(len(each.sizes) for each in artifacts)
    validation.bytes_total = sum(sum(each.sizes.values()) for each in artifacts)
    checked: dict[str, dict[str, str]] = validation.checked
    for artifact in artifacts:
        done = checked.setdefault(artifact.uri, {})
        for path, digest in sorted(artifact.manifest.files.items()):
            if done.get(path) == digest:
                continue
            if turn.is_over:
                _store_progress(validation, artifacts, 0, turn)
                return False
            _check_file(validation, artifacts, artifact, path, turn)
            done[path] = digest
    return True


def _check_file(
    validation: Validation, artifacts: list[OpenArtifact], artifact: OpenArtifact, path: str, turn: Slice
) -> None:
    begun_at = turn.clock_now()

    def progress(so_far: int) -> None:
        now = turn.clock_now()
        if (now - begun_at).total_seconds() > turn.limits.file_s:
            raise BadArtifact(f"{artifact.uri}/{path} was not read within {turn.limits.file_s:g} s; split it")
        if (now - turn.noted_at).total_seconds() >= NOTE_EVERY_S:
            _store_progress(validation, artifacts, so_far, turn)

    digest = file_sha256(artifact, path, progress)
    if digest != artifact.manifest.files[path]:
        # Its facts may come from the corrupt file, and the repaired artifact has the same digest.
        CheckpointRecord.objects.filter(uri=artifact.uri, digest=artifact.manifest.digest).delete()
        raise BadArtifact(
            f"{artifact.uri}/{path} is corrupt: its sha256 is {digest}, the manifest has "
            f"{artifact.manifest.files[path]}"
        )


def _store_progress(validation: Validation, artifacts: list[OpenArtifact], so_far: int, turn: Slice) -> None:
    """Store the progress and renew the lease. Raises _TurnLost if another worker has the lease, or the validation has
    ended."""
    turn.noted_at = turn.clock_now()
    done = [each.sizes[path] for each in artifacts for path in validation.checked.get(each.uri, {})]
    progress: dict[str, Any] = {
        "files_total": validation.files_total,
        "bytes_total": validation.bytes_total,
        "files_done": len(done),
        "bytes_done": sum(done) + so_far,
        "checked": validation.checked,
        "reason": "",
        "seen_at": turn.noted_at,
    }
    if not turn.take() or not _running(validation).update(**progress):
        raise _TurnLost
    live.push("models", validation.version.reference)


def _note_trouble(validation: Validation, trouble: str, turn: Slice) -> None:
    validation.troubles += 1
    if validation.troubles >= turn.limits.troubles:
        _end_validation(
            validation,
            ValidationState.FAILED,
            f"{trouble}; given up after {validation.troubles} tries",
            turn.clock_now(),
        )
        return
    log.warning("validation of %s: %s", validation.version, trouble)
    reason = f"{trouble}; trying again"
    _running(validation).update(
        troubles=validation.troubles, reason=reason, checked=validation.checked, seen_at=turn.clock_now()
    )
    live.push("models", validation.version.reference)


def _mark_validated(validation: Validation, artifacts: list[OpenArtifact], now: datetime) -> None:
    """Move the draft to `validated` with its evidence, if it has not changed since."""
    version = validation.version
    digests = {each.uri: each.manifest.digest for each in artifacts}
    columns = _digest_columns(version, digests)
    with transaction.atomic():
        evidence = _evidence(version, artifacts)
        files, size = validation.files_total, validation.bytes_total
        read = f"{files} files, {size_words(size)}, match their digests" if files else "it names no artifact"
        ended = _running(validation).update(
            state=ValidationState.PASSED.value,
            reason=read,
            evidence=evidence,
            checked={},
            files_total=files,
            files_done=files,
            bytes_total=size,
            bytes_done=size,
            seen_at=now,
            ended_at=now,
        )
        if not ended:
            raise _TurnLost
        reason = f"validated for {validation.actor}: {read}; {_shown_on(evidence)}"
        if version_move(version, VersionState.VALIDATED, reason=reason, actor=validation.actor, now=now, **columns):
            return
        transaction.set_rollback(True)
    _end_validation(validation, ValidationState.FAILED, "the draft was changed meanwhile; validate it again", now)


def _digest_columns(version: ModelVersion, digests: Mapping[str, str]) -> dict[str, Any]:
    """The computed digests, for the fields that name these artifacts."""
    columns: dict[str, Any] = {}
    if version.artifact_uri in digests:
        columns["artifact_digest"] = digests[version.artifact_uri]
    if version.adapters:
        columns["adapters"] = [_with_digest(one, digests) for one in version.adapters]
    if version.by_type:
        columns["by_type"] = {kind: _with_digest(stated, digests) for kind, stated in version.by_type.items()}
    return columns


def _with_digest(stated: Mapping[str, Any], digests: Mapping[str, str]) -> dict[str, Any]:
    uri: str = stated.get("artifact_uri", "")
    return {**stated, "artifact_digest": digests[uri]} if uri in digests else dict(stated)


def _evidence(version: ModelVersion, artifacts: list[OpenArtifact]) -> dict[str, Any]:
    spec = version.spec(engine_allowances())
    problems = _evaluated(version, artifacts).problems
    return {
        "artifacts": [
            {
                "uri": each.uri,
                "digest": each.manifest.digest,
                "files": len(each.sizes),
                "bytes": sum(each.sizes.values()),
            }
            for each in artifacts
        ],
        "instance_types": [
            {"instance_type": name, "engine": spec.on(name).engine, "problem": problem}
            for name, problem in problems.items()
        ],
        "golden_prompts": len(version.golden_prompts),
        "golden_waiver": version.golden_waiver,
    }


def _shown_on(evidence: Mapping[str, Any]) -> str:
    """The instance types on which a cell is possible, and those on which it is not."""
    possible = [one["instance_type"] for one in evidence["instance_types"] if not one["problem"]]
    impossible = [one["instance_type"] for one in evidence["instance_types"] if one["problem"]]
    told = f"a cell is possible on {', '.join(possible)}"
    return f"{told}, not on {', '.join(impossible)}" if impossible else told


def _end_validation(validation: Validation, state: ValidationState, reason: str, now: datetime) -> None:
    ended: dict[str, Any] = {"state": state.value, "reason": reason, "checked": {}, "seen_at": now, "ended_at": now}
    with transaction.atomic():
        if _running(validation).update(**ended):
            message = f"{validation.version} is not validated: {reason}"
            _record(validation, state.value, message, Tone.BAD, now)


def _running(validation: Validation) -> Any:
    return Validation.objects.filter(pk=validation.pk, state=ValidationState.RUNNING.value)


def _record(validation: Validation, what: str, message: str, tone: Tone, now: datetime) -> None:
    event_record(
        kind=f"version.validation_{what}",
        message=message,
        tone=tone,
        now=now,
        actor=validation.actor,
        detail={"version": validation.version.reference, "validation": validation.pk},
    )
    live.push("models", validation.version.reference)
