"""Releases of the agent on the page of nodes: the skew, the newest upgrade, beginning one, and taking it back."""

from django.http import Http404, HttpResponse
from django.shortcuts import redirect

from controlplane.dashboard.actions import Submission, action, page_target
from controlplane.dashboard.fragments import Fragment, PageRequest
from controlplane.dashboard.selectors.agents import AgentList, agent_list
from fleet.api.agents import UpgradeSerializer
from fleet.selectors.agents import active_rollout
from fleet.services.agent_rollouts import agent_rollout_begin, agent_rollout_cancel


def _agents(request: PageRequest) -> AgentList:
    return agent_list(now=request.now)


AGENTS = Fragment("agents", "Agents", ("agents", "nodes", "traffic"), "dashboard/nodes/agents.html", _agents)


@action(page_target("nodes", "agents"))
def agents_upgrade_action(form: Submission, _: None) -> HttpResponse:
    body = form.valid(UpgradeSerializer, "release", "soak_s", "why")
    agent_rollout_begin(actor=form.actor, now=form.now, **body)
    return redirect("nodes")


@action(page_target("nodes", "agents"))
def agents_cancel_action(form: Submission, _: None) -> HttpResponse:
    rollout = active_rollout()
    if rollout is None:
        raise Http404("No upgrade of agents is under way.")
    agent_rollout_cancel(rollout_id=rollout.pk, actor=form.actor, now=form.now, why=form.text("why"))
    return redirect("nodes")
