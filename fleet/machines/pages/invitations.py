"""Invitations: the form that adds machines, the join line, which is shown once, and the page with the hosts that joined
or were refused."""

import shlex
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.http import Http404, HttpResponse
from django.shortcuts import render
from rest_framework import serializers

from controlplane.dashboard.actions import Action, Field, Submission, action, action_view, page_target
from controlplane.dashboard.fragments import Fragment, Page, PageRequest, found_or_404
from controlplane.dashboard.lists import List, plain
from fleet.agents.services.enrolment import join_line
from fleet.machines.api import InviteSerializer
from fleet.machines.models import Invitation, Machine
from fleet.machines.planner import POOLED
from fleet.machines.selectors import invitations_described, machines_described
from fleet.machines.services.machines import MOST_INVITED, invitation_create, invitation_withdraw
from fleet.reconcile.planning.states import MachineRole, MachineState, choices
from fleet.regions.models import Region
from kernel.models import Event
from kernel.tones import Tone
from models_registry.instance_types.selectors import instance_type_names

HOURS = "valid_for_hours"
ROLES = tuple(choices(MachineRole))


class _Hours(serializers.Serializer[Any]):
    """Validity of an invitation as the form states it; the API takes a duration."""

    valid_for_hours = serializers.IntegerField(min_value=1, max_value=168)


def _invite(form: Submission, _: None) -> HttpResponse:
    expires_in = timedelta(hours=form.valid(_Hours, HOURS)[HOURS])
    body = form.valid(InviteSerializer, "region", "count", "role", "instance_type", "layout")
    new = invitation_create(
        region=body["region"],
        count=body["count"],
        expires_in=expires_in,
        role=MachineRole(body["role"]),
        instance_type=body["instance_type"],
        layout=body["layout"],
        actor=form.actor,
        now=form.now,
    )
    line = join_line(new.text)
    context = {
        "invitation": new.invitation,
        "line": line.text,
        "notices": line.notices,
        "now": form.now,
        "command": _add_command(new.invitation, expires_in),
    }
    return render(form.request, "fleet/machines/join_line.html", context)


def _add_command(row: Invitation, expires_in: timedelta) -> str:
    words = ["switchyard", "machine", "add", "--region", row.region_id, "--count", str(row.count)]
    words += ["--expires", f"{expires_in // timedelta(hours=1)}h", "--role", row.role]
    words += ["--instance-type", row.instance_type_id] if row.instance_type_id else []
    words += ["--layout", row.layout] if row.layout else []
    return shlex.join(words)


def _pooled_regions() -> tuple[str, ...]:
    return tuple(Region.objects.filter(provider=POOLED).values_list("name", flat=True))


def _invite_fields(_: None) -> tuple[Field, ...]:
    kinds = (("", "as the agent finds"), *((name, name) for name in instance_type_names()))
    return (
        Field("region", "Region", kind="select", options=tuple((name, name) for name in _pooled_regions())),
        Field("role", "Role", kind="select", options=tuple((value, label.lower()) for value, label in ROLES)),
        Field("count", "Hosts", kind="number", value=1, required=True, least=1, most=MOST_INVITED),
        Field(HOURS, "Valid for, hours", kind="number", value=1, required=True, least=1, most=168),
        Field("instance_type", "Instance type", kind="select", options=kinds),
        Field("layout", "Layout of each host, such as 4x2 (empty: one node)"),
    )


def _why_no_invitation(_: None) -> str:
    return "" if _pooled_regions() else "Hosts join regions of provider machines. Create one first."


machine_add_action = action_view(
    Action(
        target=page_target("machines", "machines"),
        name="add",
        label="Add",
        submit="Show the line",
        run=_invite,
        fields=_invite_fields,
        effect=lambda _, now: "The next page shows one line to run on each host: Linux with Python 3.11 or later.",
        why_not=_why_no_invitation,
    )
)
TOPICS = ("machines", "events")
REFUSALS_SHOWN = 5
INVITATION_TONE = {"open": Tone.MOVING, "used": Tone.OK, "expired": Tone.IDLE, "withdrawn": Tone.IDLE}


@dataclass(frozen=True, slots=True)
class InvitationRow:
    row: Invitation
    state: str

    @property
    def prefix(self) -> str:
        return self.row.prefix

    @property
    def tone(self) -> Tone:
        return INVITATION_TONE[self.state]


@dataclass(frozen=True, slots=True)
class InvitationHosts:
    """Numbers of the hosts that use an invitation, and the last ones that its checks refused. A host has `joined` when
    its agent has connected; `joining` ones only have a credential."""

    row: Invitation
    state: str
    joined: int
    joining: int
    refusals: tuple[Event, ...]


def _invitation(request: PageRequest) -> InvitationRow:
    row = invitations_described().filter(prefix=request.key).first()
    row = found_or_404(row, f"invitation {request.key!r}")
    return InvitationRow(row, row.state_at(request.now))


def _invitation_hosts(request: PageRequest) -> InvitationHosts:
    found = request.once(_invitation)
    hosts = machines_described().filter(invitation=found.row)
    joining = hosts.filter(state=MachineState.JOINING.value).count()
    refusals = Event.objects.filter(
        kind="machine.refused", at__gte=found.row.created_at, detail__invitation=found.prefix
    )
    return InvitationHosts(
        row=found.row,
        state=found.state,
        joined=found.row.count - found.row.left - joining,
        joining=joining,
        refusals=tuple(refusals.filter(detail__invitation=found.prefix).order_by("-id")[:REFUSALS_SHOWN]),
    )


HOST_LIST: List[Machine] = List(
    name="hosts",
    prefix="hosts-",
    columns=(
        plain("id", "Host", name="host"),
        plain("state", "State", choices=MachineState),
        plain("shown_address", "Address"),
        plain("instance_type_id", "Type", name="type"),
        plain("created_at", "Joined", "number"),
    ),
    query=lambda request: machines_described().filter(invitation=request.once(_invitation).row),
    order=("-created_at", "id"),
    find=("id", "address", "instance_type__name"),
    above=_invitation_hosts,
)
INVITATION = Page(
    section="machines",
    title="",
    fragments=(
        Fragment("invitation", "", ("machines",), "fleet/machines/invitation.html", _invitation),
        Fragment(
            "invitation-hosts",
            "Hosts",
            ("machines", "events"),
            "fleet/machines/invitation_hosts.html",
            HOST_LIST.page,
        ),
    ),
    lists=(HOST_LIST,),
)


@action(page_target("machines", "the invitation"))
def invitation_withdraw_action(form: Submission, prefix: str) -> None:
    if not Invitation.objects.filter(prefix=prefix).exists():
        raise Http404(f"There is no invitation {prefix!r}.")
    invitation_withdraw(prefix=prefix, actor=form.actor, now=form.now)
