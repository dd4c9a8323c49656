"""A plan draft against the present: steps or problems, what has changed since it was written, predicted effects, and
what the fleet would carry after it. Changes nothing: previews are rolled back."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime

from django.db.models import Q

from controlplane.api.apply.documents import role_needed
from controlplane.api.apply.execution import ApplyResult, NotPossible, Requester, documents_preview
from controlplane.api.apply.planning import Document, Present, object_revisions, revision_of
from controlplane.api.apply.present import present_of
from controlplane.api.apply.view import predicted_effects
from controlplane.dashboard.fragments import PageRequest, found_or_404
from controlplane.dashboard.wizards import documents_as_yaml
from controlplane.forecast_budget import FORECASTS
from controlplane.stored_what_ifs import WhatIfPanel, what_if_panel
from controlplane.stress import Question, WhatIf, what_if
from controlplane.what_if import HasTime, hourly_costs
from fleet.drafts.models import PlanDraft
from fleet.drafts.pages.reading import NoLongerValid, stored_documents
from fleet.drafts.services import digest_of, in_order, object_of
from kernel.refusals import Conflict, Refusal
from simulator.prediction import Forecast

OTHERS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Effect:
    """Predicted for one deployment."""

    deployment: str
    forecast: Forecast


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a changed deployment's machines, in US dollars an hour; None without a price."""

    deployment: str
    before: float | None
    after: float | None


@dataclass(frozen=True, slots=True)
class Overlap:
    """Another open draft with some of the same objects. `key`: of its link, if it is the reader's own, else ""."""

    owner: str
    name: str
    key: str
    objects: tuple[str, ...]


@dataclass
class Review:
    """`problems`: why it cannot be applied; `is_readable` False: because this release does not accept its documents.
    `changed` and `deleted`: objects that changed since their documents were added. `denied`: why this user may not
    apply it, or ""."""

    draft: PlanDraft
    is_owner: bool
    documents: tuple[Document, ...] = ()
    result: ApplyResult | None = None
    problems: list[str] = field(default_factory=list)
    is_readable: bool = True
    changed: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    overlaps: list[Overlap] = field(default_factory=list)
    is_predicted: bool = False
    effects: list[Effect] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    not_predicted: str = ""
    denied: str = ""

    @property
    def objects(self) -> list[tuple[str, str]]:
        return [object_of(one) for one in self.draft.documents]

    @property
    def yaml(self) -> str:
        return documents_as_yaml(in_order(self.draft.documents))

    @property
    def digest(self) -> str:
        return digest_of(self.draft)

    @property
    def total_cost(self) -> Cost:
        """Of all changed deployments with prices."""
        priced = [one for one in self.costs if one.before is not None and one.after is not None]
        return Cost("", sum(one.before or 0.0 for one in priced), sum(one.after or 0.0 for one in priced))

    @property
    def unpriced(self) -> int:
        return sum(one.before is None or one.after is None for one in self.costs)

    @property
    def is_possible(self) -> bool:
        return self.result is not None and bool(self.result.plan.steps) and not self.problems


def find_draft(key: str) -> PlanDraft:
    return found_or_404(PlanDraft.objects.filter(key=key).first(), f"draft {key!r}")


def draft_review(request: PageRequest) -> Review:
    review = request.once(_planned)
    if request.text("predict") and review.result is not None:
        review.is_predicted = True
        _predict(review, _requester(request), request.caller.user.get_username())
    return review


def draft_what_if(request: PageRequest) -> WhatIfPanel | None:
    """What the fleet would carry after the draft, or the present fleet for an empty one: the last answer, and a new one
    only for a new question. None if the draft was applied or cannot be."""
    review = request.once(_planned)
    if review.draft.applied_at is not None or review.problems:
        return None

    def compute(question: Question, has_time: HasTime) -> WhatIf:
        if not review.documents:
            return what_if(question, now=request.now, has_time=has_time)
        try:
            result = documents_preview(
                documents=review.documents,
                requester=_requester(request),
                with_fleet=bool(question.simulate),
                with_load=True,
                has_time=has_time,
            )
        except NotPossible as refused:
            raise Conflict(str(refused)) from None
        return what_if(
            question, now=request.now, has_time=has_time, after=result.load, fleet_after=lambda: result.fleet
        )

    return what_if_panel(
        request.filters,
        name=f"draft:{review.draft.key}",
        documents=review.digest,
        user=request.caller.user.get_username(),
        now=request.now,
        compute=compute,
    )


def _planned(request: PageRequest) -> Review:
    row, user = find_draft(request.key), request.caller.user.get_username()
    review = Review(row, row.owner == user)
    if row.applied_at is not None or not row.documents:
        return review
    review.overlaps = list(_overlaps(row, user))
    try:
        review.documents = stored_documents(row)
    except NoLongerValid as refusal:
        review.problems, review.is_readable = refusal.problems, False
        return review
    if not request.caller.access.may(role := role_needed(review.documents)):
        review.denied = f"Applying it needs the {role} role. Send its link to a user with that role."
    _note_age(review, present_of(review.documents))
    try:
        review.result = documents_preview(
            documents=review.documents, requester=_requester(request), with_fleet=False, with_cost=True
        )
        review.costs = list(_costs(review.result, request.now))
    except NotPossible as refused:
        review.problems = [f"{one.document.title}: {one.message}" for one in refused.objections]
    except Refusal as refusal:
        review.problems = [str(refusal)]
    return review


def _requester(request: PageRequest) -> Requester:
    return Requester(actor=request.caller.user.get_username()[:64], why="", now=request.now)


def _note_age(review: Review, present: Present) -> None:
    """Compares the objects with the revisions that their documents were written for."""
    bases, current = review.draft.bases, object_revisions(present)
    for (kind, name), state in present.items():
        title = f"{kind} {name}"
        if not bases.get(title) or bases[title] == current[title]:
            continue
        (review.changed if state is not None else review.deleted).append(title)


def draft_revision(row: PlanDraft) -> str:
    """Of the objects that its documents describe, "" if they are no longer valid."""
    try:
        return revision_of(present_of(stored_documents(row)))
    except NoLongerValid:
        return ""


def _overlaps(row: PlanDraft, user: str) -> Iterator[Overlap]:
    objects = {object_of(one) for one in row.documents}
    shared = Q()
    for kind, name in objects:
        shared |= Q(documents__contains=[{"kind": kind, "metadata": {"name": name}}])
    others = PlanDraft.objects.filter(shared, applied_at=None).exclude(key=row.key)
    for other in others.order_by("-changed_at", "key")[:OTHERS_SHOWN]:
        both = sorted(" ".join(one) for one in objects & {object_of(one) for one in other.documents})
        is_own = other.owner == user
        yield Overlap(other.owner, other.name if is_own else "", other.key if is_own else "", tuple(both))


def _costs(result: ApplyResult, now: datetime) -> Iterator[Cost]:
    """Of each deployment that the steps change, the greatest difference first."""
    after = result.hourly_usd
    before = hourly_costs(after, now)
    found = [Cost(name, before[name], after[name]) for name in after]
    yield from sorted(found, key=lambda one: -abs((one.after or 0.0) - (one.before or 0.0)))


def _predict(review: Review, requester: Requester, user: str) -> None:
    try:
        with FORECASTS.take(user) as has_time:
            result = documents_preview(documents=review.documents, requester=requester, has_time=has_time)
            forecasts, beyond = predicted_effects(result, requester.now, has_time)
    except (Refusal, NotPossible) as refusal:
        review.not_predicted = str(refusal)
        return
    review.effects = [Effect(name, forecast) for name, forecast in forecasts.items()]
    review.not_predicted = f"only {len(forecasts)} at a time; without {', '.join(beyond)}" if beyond else ""
