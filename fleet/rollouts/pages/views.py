"""The list of rollouts; the page of one with its actions; the page that previews and starts one. Services decide."""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from functools import partial

from django.db.models import Case, Q, QuerySet, When
from django.http import HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.urls import reverse

from accounts.models import Approval
from controlplane.dashboard.actions import (
    REQUIRED_WHY,
    WHY,
    Action,
    ActionMenu,
    ActionPage,
    Confirmation,
    Field,
    Submission,
    Target,
    action_menu,
    action_page_view,
    action_view,
)
from controlplane.dashboard.charts import Chart
from controlplane.dashboard.choices import choose_labelled
from controlplane.dashboard.events import EventList, marked, rollout_events
from controlplane.dashboard.fragments import Context, Filter, Fragment, Page, PageRequest, found_or_404
from controlplane.dashboard.lists import Column, List, ListPage
from fleet.cells.pages.data import CellSummary, cells_of
from fleet.deployments.models import Deployment
from fleet.reconcile.planning.states import RolloutState, choices
from fleet.recorder.pages.why import why_fragment
from fleet.recorder.planning.reasons import Subject
from fleet.rollouts.models import Rollout
from fleet.rollouts.pages.data import RolloutDetail, RolloutRow, rollout_charts, rollout_find
from fleet.rollouts.planning.waves import preview_seconds, preview_stages
from fleet.rollouts.selectors import (
    ACTIVE,
    rollouts_described,
    stage_label,
)
from fleet.rollouts.services import (
    Proposal,
    already_serves,
    rollout_abort,
    rollout_pause,
    rollout_propose,
    rollout_resume,
    rollout_roll_back,
    rollout_skip_bake,
    rollout_start_or_request,
)
from models_registry.versions.models import ModelVersion
from models_registry.versions.planning.lifecycle import VersionState


def _listed(request: PageRequest) -> "QuerySet[Rollout]":
    rollouts, state, text = rollouts_described(), request.text("state"), request.text("q")
    if state == "active":
        rollouts = rollouts.filter(state__in=ACTIVE)
    elif state:
        rollouts = rollouts.filter(state=state)
    if text:
        rollouts = rollouts.filter(Q(deployment__name__icontains=text) | Q(reason__icontains=text))
    return rollouts


ROLLOUT_LIST: List[RolloutRow] = List(
    name="rollouts",
    columns=(
        Column("rollout", "Rollout", lambda row: row.rollout.pk, ("id",), is_newest_first=True),
        Column("state", "State", lambda row: row.rollout.state, ("state",)),
        Column("deployment", "Deployment", lambda row: row.rollout.deployment_id, ("deployment_id",)),
        Column("from", "From", lambda row: row.rollout.from_version.reference, ("from_version_id",), "wide"),
        Column("to", "To", lambda row: row.rollout.to_version.reference, ("to_version_id",)),
        Column("stage", "Stage", lambda row: row.stage, ("stage",), "wide"),
        Column("actor", "Started by", lambda row: row.rollout.actor, ("actor",), "wide"),
        Column(
            "started", "Started", lambda row: row.rollout.created_at, ("created_at",), "number", is_newest_first=True
        ),
    ),
    query=_listed,
    rows=lambda rollouts, now: [RolloutRow(rollout, stage_label(rollout)) for rollout in rollouts],
    order=("-id",),
    filters=("state", "q"),
)


EVENTS_OF_ONE_ROLLOUT = 100
VERSIONS_OFFERED = 200

OFFERED: dict[RolloutState, tuple[str, ...]] = {
    RolloutState.RUNNING: ("pause", "roll-back", "abort"),
    RolloutState.BAKING: ("skip-bake", "pause", "roll-back", "abort"),
    RolloutState.PAUSED: ("resume", "skip-bake", "roll-back", "abort"),
    RolloutState.ROLLING_BACK: ("abort",),
}
EFFECTS: dict[str, str] = {
    "pause": "No further cell is updated. Cells that are being updated finish.",
    "resume": "The stage continues. A bake starts over.",
    "skip-bake": "The next stage starts without a gate decision.",
    "roll-back": "Every cell returns to the previous version.",
    "abort": "The rollout ends here. Every cell keeps the version that it runs.",
}


def _rollout_filter(request: PageRequest) -> Filter:
    options = (("", "all"), ("active", "active"), *choices(RolloutState))
    state = choose_labelled(request, "state", options)
    return Filter(text_label="Find by deployment or reason", text_name="q", text=request.text("q"), choices=(state,))


def _rollout(request: PageRequest) -> RolloutDetail:
    return found_or_404(rollout_find(request.key), f"rollout {request.key!r}")


def _rollout_charts(request: PageRequest) -> tuple[Chart, ...]:
    rollout = request.once(_rollout).rollout
    return marked(rollout_charts(rollout, request.now), deployment=rollout.deployment_id)


def _rollout_cells(request: PageRequest) -> ListPage[CellSummary]:
    return cells_of(request.once(_rollout).rollout.deployment_id, request.now)


def _rollout_action_menu(request: PageRequest) -> ActionMenu:
    return action_menu(request.once(_rollout).rollout, request.caller.access, *ROLLOUT_ACTIONS)


def _events_of_rollout(request: PageRequest) -> EventList:
    return rollout_events(request.once(_rollout).rollout, EVENTS_OF_ONE_ROLLOUT)


ROLLOUTS = Page(
    section="rollouts",
    title="Rollouts",
    fragments=(Fragment("rollouts-table", "", ("rollouts",), "fleet/rollouts/table.html", ROLLOUT_LIST.page),),
    narrow=_rollout_filter,
    lists=(ROLLOUT_LIST,),
)

ROLLOUT = Page(
    section="rollouts",
    title="",
    charts=True,
    actions=_rollout_action_menu,
    fragments=(
        Fragment("rollout", "", ("rollouts:{key}", "cells"), "fleet/rollouts/rollout.html", _rollout),
        Fragment(
            "rollout-charts",
            "New and old version",
            ("rollouts:{key}",),
            "dashboard/charts/several.html",
            _rollout_charts,
        ),
        why_fragment(Subject.ROLLOUT),
        Fragment("rollout-cells", "Cells", ("cells", "load"), "fleet/cells/table.html", _rollout_cells),
        Fragment("rollout-events", "Events", ("events",), "dashboard/events/list.html", _events_of_rollout),
    ),
)


def _run_service(service: Callable[..., None], form: Submission, rollout: Rollout) -> None:
    service(rollout_id=rollout.pk, actor=form.actor, now=form.now, why=form.text("why"))


TARGET = Target(
    noun="rollout",
    find=lambda rollout_id: get_object_or_404(Rollout, pk=rollout_id),
    name=lambda rollout: f"rollout {rollout.pk}",
    url=lambda rollout: reverse("rollout", args=(rollout.pk,)),
    deployment=lambda rollout: rollout.deployment_id,
    action_url=lambda rollout, name: reverse("rollout-action", args=(rollout.pk, name)),
)
SERVICES: dict[str, Callable[..., None]] = {
    "pause": rollout_pause,
    "resume": rollout_resume,
    "skip-bake": rollout_skip_bake,
    "roll-back": rollout_roll_back,
    "abort": rollout_abort,
}


def _effect(name: str, rollout: Rollout, now: datetime) -> str:
    return EFFECTS[name]


WORDS = {"skip-bake": ("promote",), "resume": ("promote", "continue"), "abort": ("stop",)}
"""Other names of these actions, as in Argo Rollouts."""


def _why_not(name: str, rollout: Rollout) -> str:
    state = RolloutState(rollout.state)
    return "" if name in OFFERED.get(state, ()) else f"Not for a rollout that is {rollout.get_state_display().lower()}."


ROLLOUT_ACTIONS = tuple(
    Action(
        target=TARGET,
        name=name,
        label=name.replace("-", " ").capitalize(),
        run=partial(_run_service, service),
        fields=(REQUIRED_WHY if name == "skip-bake" else WHY,),
        effect=partial(_effect, name),
        why_not=partial(_why_not, name),
        words=WORDS.get(name, ()),
    )
    for name, service in SERVICES.items()
)
rollout_action = action_view(*ROLLOUT_ACTIONS)


def _propose_from_form(form: Submission) -> Proposal:
    return rollout_propose(
        deployment=form.text("deployment"),
        version=_chosen_version(form),
        policy={},
        allow_unreleased=form.text("unreleased") == "yes",
    )


def _start_from_form(form: Submission, thing: None) -> Approval | HttpResponse:
    started = rollout_start_or_request(
        proposal=_propose_from_form(form), actor=form.actor, now=form.now, why=form.text("why")
    )
    return started if isinstance(started, Approval) else redirect("rollout", key=str(started.pk))


def _chosen_version(form: Submission) -> str:
    """The version in the form, or else the newest released version of the deployment's model."""
    released = ModelVersion.objects.filter(
        state=VersionState.RELEASED.value, model__versions__deployments=form.text("deployment")
    )
    newest = None if form.text("version") else released.order_by("-id").first()
    return newest.reference if newest is not None else form.text("version")


def _form_context(form: Submission, thing: None) -> Context:
    """All deployments, and the versions of the chosen one's model: released ones first, the newest first."""
    deployments = list(Deployment.objects.order_by("name").values_list("name", flat=True))
    chosen = form.text("deployment")
    states = [VersionState.RELEASED.value, VersionState.VALIDATED.value]
    versions = ModelVersion.objects.filter(state__in=states, model__versions__deployments=chosen).distinct()
    released_first = Case(When(state=VersionState.RELEASED.value, then=0), default=1)
    offered = versions.order_by(released_first, "-id").only("model_id", "version", "state")[:VERSIONS_OFFERED]
    return {
        "form": {"deployment": chosen, "unreleased": form.text("unreleased"), "version": _chosen_version(form)},
        "deployments": deployments,
        "versions": [(version.reference, version.state) for version in offered],
    }


def _preview_context(form: Submission, thing: None) -> Context:
    """The stages of the rollout that the form describes, or {} while it is incomplete."""
    deployment, version = form.text("deployment"), _chosen_version(form)
    if not deployment or not version:
        return {}
    proposal = _propose_from_form(form)
    if already_serves(proposal.deployment, proposal.version):
        return {"serves_already": proposal}
    stages = preview_stages(proposal.policy, proposal.wanted, proposal.regions, proposal.splits)
    confirmation = Confirmation(
        name="start",
        label="Start",
        url=reverse("rollout-new"),
        effect="",
        submit=f"Roll {deployment} out to {version}",
        fields=(
            Field("deployment", kind="hidden", value=deployment),
            Field("version", kind="hidden", value=version),
            Field("unreleased", kind="hidden", value=form.text("unreleased")),
            replace(WHY, value=form.text("why")),
        ),
    )
    return {
        "proposal": proposal,
        "stages": stages,
        "at_least_s": preview_seconds(proposal.policy, stages),
        "confirmation": confirmation,
    }


NEW_ROLLOUT = Target(
    noun="rollout", find=lambda: None, name=lambda thing: "rollouts", url=lambda thing: reverse("rollouts")
)
START = Action(target=NEW_ROLLOUT, name="start", label="Start", run=_start_from_form)
rollout_new = action_page_view(
    ActionPage(
        action=START,
        template="fleet/rollouts/new.html",
        context=_form_context,
        predict=_preview_context,
        deployment=lambda form: form.text("deployment"),
    )
)
