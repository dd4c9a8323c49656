"""Changes plan drafts. Callers have validated the documents. A draft changes nothing in the fleet, so it has no events;
applying it has those of its steps."""

import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from django.core.exceptions import PermissionDenied
from django.db import transaction

from fleet.drafts.models import PlanDraft
from kernel.refusals import Conflict, InvalidInput

DRAFTS_MOST = 20
"""Of a user, without applied ones. As many applied ones are kept."""
DOCUMENTS_MOST = 100
BYTES_MOST = 200_000
NAME_MOST = 80
FIELDS = ("apiVersion", "kind", "metadata", "spec")
Documents = list[dict[str, Any]]
Bases = Mapping[str, str]
"""Kind and name of an object -> its revision."""


def digest_of(row: PlanDraft) -> str:
    """A short text that changes with the draft's documents."""
    text = json.dumps(row.documents, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def merged(documents: Iterable[dict[str, Any]], more: Iterable[dict[str, Any]]) -> Documents:
    """Both lists; a document of the second replaces that of the same object in the first."""
    return list({object_of(one): one for one in (*documents, *more)}.values())


def in_order(documents: Iterable[dict[str, Any]]) -> Documents:
    """With the fields of each document in the usual order, which the database does not keep."""
    return [{name: one[name] for name in FIELDS if name in one} for one in documents]


def object_of(document: dict[str, Any]) -> tuple[str, str]:
    return str(document["kind"]), str(document["metadata"]["name"])


@transaction.atomic
def draft_create(*, owner: str, name: str, documents: Documents, bases: Bases, now: datetime) -> PlanDraft:
    """`bases`: present revisions of the objects. Raises InvalidInput if the user has too many drafts, or the documents
    are too large."""
    drafts = list(PlanDraft.objects.select_for_update().filter(owner=owner))
    applied = [row.pk for row in drafts if row.applied_at is not None]
    if len(drafts) - len(applied) >= DRAFTS_MOST:
        message = f"you have {DRAFTS_MOST} drafts, the limit: apply or delete one first"
        raise InvalidInput(field="name", rule="most", message=message)
    PlanDraft.objects.filter(pk__in=applied[DRAFTS_MOST - 1 :]).delete()
    return PlanDraft.objects.create(
        key=secrets.token_urlsafe(16),
        owner=owner,
        name=_name(name) or f"Draft of {now:%Y-%m-%d %H:%M}",
        documents=_within_limits(documents),
        bases=_bases(documents, bases),
        changed_at=now,
    )


@transaction.atomic
def draft_add(*, owner: str, documents: Documents, bases: Bases, now: datetime) -> PlanDraft:
    """Add documents to the user's latest draft, or to a new one. Raises InvalidInput if it becomes too large."""
    drafts = PlanDraft.objects.select_for_update().filter(owner=owner, applied_at=None)
    row = drafts.order_by("-changed_at", "key").first()
    if row is None:
        return draft_create(owner=owner, name="", documents=documents, bases=bases, now=now)
    return _store(row, merged(row.documents, documents), bases, now)


@transaction.atomic
def draft_change(
    *, key: str, actor: str, name: str, documents: Documents, bases: Bases, digest: str, now: datetime
) -> PlanDraft:
    """Replace the documents. `digest`: of the documents that the user has seen. Raises Conflict if the draft was
    applied or has changed since, InvalidInput if it becomes too large, PermissionDenied for users other than its
    owner."""
    row = _changeable(key, actor)
    if digest != digest_of(row):
        raise Conflict("the draft has changed since this page was shown; copy your text and open the form again")
    row.name = _name(name) or row.name
    return _store(row, documents, bases, now)


@transaction.atomic
def draft_remove(*, key: str, actor: str, kind: str, name: str, now: datetime) -> PlanDraft:
    """Remove the document of this object; without one, nothing changes. Raises as `draft_change`."""
    row = _changeable(key, actor)
    return _store(row, [one for one in row.documents if object_of(one) != (kind, name)], {}, now)


@transaction.atomic
def draft_delete(*, key: str, actor: str) -> None:
    """Raises PermissionDenied for users other than its owner."""
    row = PlanDraft.objects.select_for_update().filter(key=key).first()
    if row is not None:
        require_owner(row, actor)
        row.delete()


def draft_finish(*, key: str, digest: str, actor: str, now: datetime) -> PlanDraft | None:
    """Mark the draft as applied, in the transaction of the caller that applies it. Returns None if it was applied
    already. Raises Conflict if its documents have changed since the user saw them, or it was deleted."""
    row = PlanDraft.objects.select_for_update().filter(key=key).first()
    if row is None:
        raise Conflict("the draft was deleted meanwhile")
    if row.applied_at is not None:
        return None
    if digest != digest_of(row):
        raise Conflict("the draft has changed since this page was shown; review it again")
    row.applied_at, row.applied_by = now, actor
    row.save(update_fields=["applied_at", "applied_by"])
    return row


def require_owner(row: PlanDraft, actor: str) -> None:
    if row.owner != actor:
        raise PermissionDenied(f"Only {row.owner} may change this draft. Download it to start your own.")


def _changeable(key: str, actor: str) -> PlanDraft:
    row = PlanDraft.objects.select_for_update().filter(key=key).first()
    if row is None:
        raise Conflict("the draft was deleted meanwhile")
    require_owner(row, actor)
    if row.applied_at is not None:
        raise Conflict("the draft was applied; start a new one")
    return row


def _store(row: PlanDraft, documents: Documents, bases: Bases, now: datetime) -> PlanDraft:
    """Unchanged documents keep the revisions for which they were written."""
    kept = _bases([one for one in row.documents if one in documents], row.bases)
    row.documents, row.bases = _within_limits(documents), _bases(documents, {**bases, **kept})
    row.changed_at = now
    row.save(update_fields=["name", "documents", "bases", "changed_at"])
    return row


def _bases(documents: Documents, bases: Bases) -> dict[str, str]:
    return {title: bases[title] for title in map(_title, documents) if title in bases}


def _title(document: dict[str, Any]) -> str:
    return " ".join(object_of(document))


def _within_limits(documents: Documents) -> Documents:
    size = len(json.dumps(documents).encode())
    for count, most, unit in ((len(documents), DOCUMENTS_MOST, "documents"), (size, BYTES_MOST, "bytes")):
        if count > most:
            message = f"the draft would have {count:,} {unit}; the limit is {most:,}"
            raise InvalidInput(field="yaml", rule="most", message=message)
    return documents


def _name(text: str) -> str:
    if len(text) > NAME_MOST:
        message = f"the name has {len(text)} characters; the limit is {NAME_MOST}"
        raise InvalidInput(field="name", rule="most", message=message)
    return text.strip()
