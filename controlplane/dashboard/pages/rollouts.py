"""The list of rollouts, the page of one with its actions, and the page that previews and starts one."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from django.http import Http404, HttpResponse
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
    action_page_view,
    action_view,
)
from controlplane.dashboard.charts import Chart
from controlplane.dashboard.fragments import Context, Filter, Fragment, Page, PageRequest
from controlplane.dashboard.pages.choices import choose_labelled
from controlplane.dashboard.selectors.cells import CellList, cells_of
from controlplane.dashboard.selectors.events import EventList, rollout_events
from controlplane.dashboard.selectors.rollout_charts import rollout_charts
from controlplane.dashboard.selectors.rollouts import RolloutDetail, RolloutList, rollout_find, rollout_list
from fleet.models import Deployment, Rollout
from fleet.planning.rollout.preview import preview_seconds, preview_stages
from fleet.planning.states import RolloutState, choices
from fleet.services.rollout_actions import (
    Proposal,
    already_serves,
    rollout_abort,
    rollout_pause,
    rollout_propose,
    rollout_resume,
    rollout_roll_back,
    rollout_skip_bake,
)
from fleet.services.rollout_request import rollout_start_or_request
from models_registry.models import ModelVersion
from models_registry.planning.lifecycle import VersionState

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


def _list(request: PageRequest) -> RolloutList:
    return rollout_list(state=request.text("state"), text=request.text("q"))


def _filter(request: PageRequest) -> Filter:
    options = (("", "all"), ("active", "active"), *choices(RolloutState))
    state = choose_labelled(request, "state", options)
    return Filter(text_label="Find by deployment or reason", text_name="q", text=request.text("q"), choices=(state,))


def _rollout(request: PageRequest) -> RolloutDetail:
    detail = rollout_find(request.key)
    if detail is None:
        raise Http404(f"There is no rollout {request.key!r}.")
    return detail


def _charts(request: PageRequest) -> tuple[Chart, ...]:
    return rollout_charts(request.once(_rollout).rollout, request.now)


def _cells(request: PageRequest) -> CellList:
    return cells_of(request.once(_rollout).rollout.deployment_id, request.now)


def _actions(request: PageRequest) -> ActionMenu:
    rollout = request.once(_rollout).rollout
    names = OFFERED.get(RolloutState(rollout.state), ())
    confirmations = tuple(
        ACTIONS[name].confirmation(rollout, reverse("rollout-action", args=(rollout.pk, name)), EFFECTS[name])
        for name in names
    )
    return ActionMenu(confirmations, "" if names else "This rollout has ended.", rollout.deployment_id)


def _events(request: PageRequest) -> EventList:
    return rollout_events(request.once(_rollout).rollout, EVENTS_OF_ONE_ROLLOUT)


ROLLOUTS = Page(
    section="rollouts",
    title="Rollouts",
    fragments=(Fragment("rollouts-table", "", ("rollouts",), "dashboard/rollouts/table.html", _list),),
    narrow=_filter,
)

ROLLOUT = Page(
    section="rollouts",
    title="",
    charts=True,
    fragments=(
        Fragment("rollout", "", ("rollouts:{key}", "cells"), "dashboard/rollouts/rollout.html", _rollout),
        Fragment("rollout-actions", "Actions", ("rollouts:{key}",), "dashboard/actions.html", _actions),
        Fragment(
            "rollout-charts",
            "New and old version",
            ("rollouts:{key}",),
            "dashboard/charts/several.html",
            _charts,
        ),
        Fragment("rollout-cells", "Cells", ("cells", "load"), "dashboard/cells/table.html", _cells),
        Fragment("rollout-events", "Events", ("events",), "dashboard/events/list.html", _events),
    ),
)


def _carry_out(service: Callable[..., None], form: Submission, rollout: Rollout) -> None:
    service(rollout_id=rollout.pk, actor=form.actor, now=form.now, why=form.text("why"))


TARGET = Target(
    noun="rollout",
    find=lambda rollout_id: get_object_or_404(Rollout, pk=rollout_id),
    name=lambda rollout: f"rollout {rollout.pk}",
    url=lambda rollout: reverse("rollout", args=(rollout.pk,)),
    deployment=lambda rollout: rollout.deployment_id,
)
SERVICES: dict[str, Callable[..., None]] = {
    "pause": rollout_pause,
    "resume": rollout_resume,
    "skip-bake": rollout_skip_bake,
    "roll-back": rollout_roll_back,
    "abort": rollout_abort,
}
ACTIONS: dict[str, Action[Rollout]] = {
    name: Action(
        target=TARGET,
        name=name,
        label=name.replace("-", " ").capitalize(),
        run=partial(_carry_out, service),
        fields=(REQUIRED_WHY if name == "skip-bake" else WHY,),
    )
    for name, service in SERVICES.items()
}
rollout_action = action_view(*ACTIONS.values())


def _propose(form: Submission) -> Proposal:
    return rollout_propose(
        deployment=form.text("deployment"),
        version=_version(form),
        policy={},
        allow_unreleased=form.text("unreleased") == "yes",
    )


def _start(form: Submission, thing: None) -> Approval | HttpResponse:
    started = rollout_start_or_request(proposal=_propose(form), actor=form.actor, now=form.now, why=form.text("why"))
    return started if isinstance(started, Approval) else redirect("rollout", key=str(started.pk))


def _version(form: Submission) -> str:
    """The one that the form names, else the deployment's newest: the last that was released of its model."""
    released = ModelVersion.objects.filter(
        state=VersionState.RELEASED.value, model__versions__deployments=form.text("deployment")
    )
    newest = None if form.text("version") else released.order_by("-id").first()
    return newest.reference if newest is not None else form.text("version")


def _options(form: Submission, thing: None) -> Context:
    """Every deployment, and the youngest versions that are neither drafts nor retired. Where no version is chosen yet,
    it is the chosen deployment's newest; without a deployment, each one's own newest is offered and no other."""
    states = [VersionState.RELEASED.value, VersionState.VALIDATED.value]
    versions = ModelVersion.objects.filter(state__in=states).order_by("-id").only("model_id", "version")
    return {
        "form": {name: form.text(name) for name in ("deployment", "unreleased")} | {"version": _version(form)},
        "deployments": Deployment.objects.order_by("name").values_list("name", flat=True),
        "versions": [version.reference for version in versions[:VERSIONS_OFFERED]],
    }


def _preview(form: Submission, thing: None) -> Context:
    """The stages of the rollout that the form describes; nothing while it describes none."""
    deployment, version = form.text("deployment"), _version(form)
    if not deployment or not version:
        return {}
    proposal = _propose(form)
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


NEW = Target(noun="rollout", find=lambda: None, name=lambda thing: "rollouts", url=lambda thing: reverse("rollouts"))
START = Action(target=NEW, name="start", label="Start", run=_start)
rollout_new = action_page_view(
    ActionPage(
        action=START,
        template="dashboard/rollouts/new.html",
        context=_options,
        predict=_preview,
        deployment=lambda form: form.text("deployment"),
    )
)
