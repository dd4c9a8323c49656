"""Moves validated versions on: to released by an operator, to retired once unused. And guards, for the
fleet, that what it is about to use is fit for it.

Every change holds the version's row lock while it asks who uses it, and whoever begins to use one takes the same lock.
"""

from datetime import datetime

from django.db import transaction

from kernel import live
from kernel.refusals import Conflict, InvalidInput
from kernel.transitions import compare_and_set
from models_registry.models import ModelVersion
from models_registry.planning.lifecycle import VERSION_TONE, VersionState, may_be_rolled_out, states_before
from models_registry.services.draft import refuse_if_used


def version_release(*, version_id: int, why: str, actor: str, now: datetime) -> ModelVersion:
    """Promote a validated version: it may be rolled out.

    Raises:
        InvalidInput: no reason is given.
        Conflict: it is not validated, or another request was faster.
    """
    return _move(version_id, VersionState.RELEASED, "release", why, actor, now)


def version_retire(*, version_id: int, why: str, actor: str, now: datetime) -> ModelVersion:
    """Take a version out of service for good.

    Raises:
        InvalidInput: no reason is given.
        Conflict: it is neither validated nor released, or in use, or another request was faster.
    """
    return _move(version_id, VersionState.RETIRED, "retire", why, actor, now)


def version_hold(*, version_id: int, allow_unreleased: bool) -> ModelVersion:
    """Lock a version that is about to be used, until the transaction ends: it cannot be retired meanwhile.

    Raises:
        Conflict: it is not released; or not even validated, where `allow_unreleased` says that this is enough.
    """
    row = ModelVersion.objects.select_for_update().get(pk=version_id)
    if not may_be_rolled_out(VersionState(row.state), allow_unreleased=allow_unreleased):
        raise Conflict(f"{row.reference} is {row.state} by now; it cannot be rolled out")
    return row


def _move(version_id: int, to: VersionState, action: str, why: str, actor: str, now: datetime) -> ModelVersion:
    if not why.strip():
        raise InvalidInput(field="why", rule="required", message=f"Give a reason: why should the version be {to}?")
    with transaction.atomic():
        row = ModelVersion.objects.select_for_update().get(pk=version_id)
        seen = VersionState(row.state)
        if seen not in states_before(to):
            needed = " or ".join(sorted(states_before(to)))
            raise Conflict(f"{row.reference} is {seen}; {action} needs one that is {needed}")
        if to is VersionState.RETIRED:
            refuse_if_used(row, action)
        reason = f"{to} by {actor}: {why.strip()}"
        version_move(row, to, reason=reason, actor=actor, now=now)
    row.refresh_from_db()
    return row


def version_move(
    row: ModelVersion, to: VersionState, *, reason: str, actor: str, now: datetime, **columns: object
) -> bool:
    """Compare and set: change the state of the version as it was seen, with its event. False: it has changed since."""
    moved = compare_and_set(
        ModelVersion.objects.filter(pk=row.pk, state=row.state, revision=row.revision),
        event={
            "kind": f"version.{to}",
            "message": f"{row.reference} is {reason}",
            "tone": VERSION_TONE[to],
            "actor": actor,
            "detail": {"version": row.reference, "was": row.state},
        },
        now=now,
        state=to.value,
        reason=reason,
        state_since=now,
        revision=row.revision + 1,
        **columns,
    )
    if moved:
        live.push("models", row.reference)
    return moved
