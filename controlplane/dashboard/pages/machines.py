"""Machines on the page of nodes: the list, the form that invites hosts, and having a machine leave."""

from datetime import timedelta
from typing import Any

from django.http import Http404, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from rest_framework import serializers

from controlplane.dashboard.actions import (
    WHY,
    Action,
    ActionPage,
    Submission,
    Target,
    action,
    action_page_view,
    page_target,
)
from controlplane.dashboard.fragments import Context, Fragment, PageRequest
from controlplane.dashboard.selectors.machines import MachineList, machine_list
from fleet.api.machine import InviteSerializer
from fleet.models import Invitation, Machine
from fleet.planning.states import MachineRole
from fleet.services.join import join_line
from fleet.services.machine import invitation_create, invitation_withdraw, machine_remove

HOURS = "valid_for_hours"


class _Hours(serializers.Serializer[Any]):
    """How long an invitation is valid, as the form says it: the API takes a duration."""

    valid_for_hours = serializers.IntegerField(min_value=1, max_value=168)


def _machines(request: PageRequest) -> MachineList:
    return machine_list(now=request.now, region=request.text("region"))


MACHINES = Fragment("machines", "Machines", ("machines", "nodes"), "dashboard/nodes/machines.html", _machines)


@action(page_target("nodes", "machines"))
def machine_add_action(form: Submission, _: None) -> HttpResponse:
    expires_in = timedelta(hours=form.valid(_Hours, HOURS)[HOURS])
    body = form.valid(InviteSerializer, "region", "count", "role", "instance_type")
    new = invitation_create(
        region=body["region"],
        count=body["count"],
        expires_in=expires_in,
        role=MachineRole(body["role"]),
        instance_type=body["instance_type"],
        actor=form.actor,
        now=form.now,
    )
    line = join_line(new.text)
    context = {"invitation": new.invitation, "line": line.text, "notices": line.notices}
    return render(form.request, "dashboard/nodes/join_line.html", context)


@action(page_target("nodes", "the invitation"))
def invitation_withdraw_action(form: Submission, prefix: str) -> None:
    if not Invitation.objects.filter(prefix=prefix).exists():
        raise Http404(f"There is no invitation {prefix!r}.")
    invitation_withdraw(prefix=prefix, actor=form.actor, now=form.now)


def _find(key: str) -> Machine:
    row = Machine.objects.filter(id=key).first()
    if row is None:
        raise Http404(f"There is no machine {key!r}.")
    return row


def _remove(form: Submission, machine: Machine) -> None:
    machine_remove(machine_id=machine.id, actor=form.actor, now=form.now, why=form.text("why"))


def _effect(machine: Machine) -> str:
    if not machine.connected:
        return "Its agent is not connected: its credential is refused from now on, and nothing on the host is wiped."
    if machine.runs:
        return f"{machine.runs} goes first; what it serves gets another node. Then the host is wiped and uninstalled."
    return "It runs nothing. The host is wiped and uninstalled."


TARGET = Target(noun="machine", find=_find, name=lambda machine: machine.id, url=lambda _: reverse("nodes"))
REMOVE = Action(target=TARGET, name="remove", label="Remove", run=_remove, typed=TARGET.name, fields=(WHY,))


def _confirmation(form: Submission, machine: Machine) -> Context:
    url = reverse("machine-remove", args=(machine.id,))
    return {"machine": machine, "confirmation": REMOVE.confirmation(machine, url, _effect(machine))}


machine_remove_page = action_page_view(
    ActionPage(action=REMOVE, template="dashboard/nodes/remove_machine.html", context=_confirmation)
)
