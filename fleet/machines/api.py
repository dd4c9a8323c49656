"""Machines and invitations over HTTP: parses requests and calls `fleet.machines.services`. Never decides."""

from datetime import timedelta
from typing import Any

from django.db.models import Q, QuerySet
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.mixins import RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from fleet.agents.services.enrolment import join_line
from fleet.cells.api import EndedHidden
from fleet.machines.models import Invitation, Machine, MachineSlot
from fleet.machines.planner import describe
from fleet.machines.selectors import invitations_described, machines_described, notices_of
from fleet.machines.services.layouts import machine_layout_set
from fleet.machines.services.machines import (
    LONGEST,
    MOST_INVITED,
    NewInvitation,
    invitation_create,
    invitation_withdraw,
    machine_remove,
)
from fleet.machines.services.revocation import machine_revoke
from fleet.machines.services.set_aside import machine_repaired
from fleet.reconcile.planning.states import MachineRole, MachineState, choices
from kernel import clock
from kernel.rest.serializers import StrictSerializer, WhySerializer, actor_of, body_of
from kernel.rest.view_sets import GenericViewSet, ListModelMixin, ReadOnlyModelViewSet
from kernel.tones import Tone

INVITATION_STATES = [("open", "Open"), ("used", "Used"), ("expired", "Expired"), ("withdrawn", "Withdrawn")]
DEFAULT_EXPIRY_S = 3600


class SlotSerializer(serializers.ModelSerializer[MachineSlot]):
    """A node's part of a machine with a layout."""

    node = serializers.CharField(source="runs", help_text="Empty: free.")
    instance_type = serializers.CharField(source="instance_type_id", allow_null=True)
    kind = serializers.CharField(source="owns.kind", help_text="Make of its devices; `cpu`: shares of the CPUs.")
    devices = serializers.ListField(source="owns.devices", child=serializers.IntegerField(), help_text="Their numbers.")
    cpus = serializers.ListField(source="owns.cpus", child=serializers.IntegerField())
    memory_bytes = serializers.IntegerField(source="owns.memory_bytes", help_text="Its share of the host's memory.")

    class Meta:
        model = MachineSlot
        fields = ["number", "node", "state", "instance_type", "kind", "devices", "cpus", "memory_bytes"]
        examples = {"kind": "nvidia", "devices": [2, 3], "cpus": [24, 25, 26], "memory_bytes": 541165879296}


class MachineSerializer(serializers.ModelSerializer[Machine]):
    provider_id = serializers.CharField(help_text="Its name at the provider.")
    region = serializers.CharField(source="region_id")
    role = serializers.ChoiceField(choices=choices(MachineRole), help_text="The role for which it joined.")
    instance_type = serializers.CharField(
        source="instance_type_id",
        allow_null=True,
        help_text="As stated in the invitation or detected by its agent; null: no type fits.",
    )
    tone = serializers.ChoiceField(choices=choices(Tone))
    node = serializers.CharField(source="runs", help_text="The node or ingress on it; empty without one.")
    layout = serializers.CharField(help_text="How its devices are divided into nodes, as `4x2`; empty: one node.")
    layout_pinned = serializers.BooleanField(
        help_text="Whether only operators change its layout. Otherwise it also changes for cells that wait for nodes."
    )
    nodes = SlotSerializer(source="slots", many=True, help_text="The nodes of its layout.")
    address = serializers.CharField(source="shown_address")
    agent_version = serializers.CharField(
        source="shown_version", help_text="Version of its machine agent, or of its node's agent."
    )
    connected = serializers.BooleanField(
        help_text="Whether its machine agent is connected; false for providers without one."
    )
    may_reboot = serializers.BooleanField(
        help_text="Whether the operator of a joined host allows the fleet to reboot it for a repair."
    )
    what = serializers.SerializerMethodField(help_text="Hardware that its agent detected, in one line.")
    zone = serializers.CharField(help_text="Zone name in its cloud; empty elsewhere.")
    market = serializers.CharField(help_text="How it was bought; empty outside clouds.")
    reservation = serializers.CharField(help_text="Its capacity reservation or Capacity Block.")
    image = serializers.CharField(help_text="The image that it booted.")
    price_per_hour = serializers.FloatField(allow_null=True, help_text="US dollars; null: unknown.")
    cloud_state = serializers.CharField(help_text="Its last state in the cloud.")
    cloud_reason = serializers.CharField(help_text="Why its cloud ended it; empty: it has not, or stated no reason.")
    network_nodes = serializers.SerializerMethodField(help_text="Widest first, starting with its zone; empty: unknown.")
    broken = serializers.DictField(
        child=serializers.CharField(), help_text="Its devices, or `machine`, that no node gets, with the reason."
    )
    notices = serializers.SerializerMethodField(help_text="Notices for operators, one sentence each.")

    class Meta:
        model = Machine
        fields = [
            "id", "provider", "provider_id", "address", "region", "role", "instance_type", "state", "reason", "tone",
            "node", "layout", "layout_pinned", "nodes", "connected", "agent_version", "may_reboot", "what", "zone",
            "market", "reservation", "image", "price_per_hour", "cloud_state", "cloud_reason", "network_nodes",
            "broken", "notices", "state_since", "created_at",
        ]  # fmt: skip
        examples = {
            "id": "m-7c1d9e02",
            "provider": "machines",
            "provider_id": "m-7c1d9e02",
            "layout": "4x2",
            "what": "8 x NVIDIA H100 80GB HBM3, 192 cores, 2015 GiB",
            "cloud_state": "",
            "cloud_reason": "",
            "broken": {},
            "network_nodes": ["spine-2", "rack-7"],
        }

    def get_what(self, machine: Machine) -> str:
        facts = machine.stated_facts()
        return describe(facts) if facts else ""

    @extend_schema_field(serializers.ListField(child=serializers.CharField()))
    def get_network_nodes(self, machine: Machine) -> list[str]:
        return list(getattr(machine, "network_nodes", None) or ())

    @extend_schema_field(serializers.ListField(child=serializers.CharField()))
    def get_notices(self, machine: Machine) -> tuple[str, ...]:
        return notices_of(machine, clock.now())


class MachineFilter(EndedHidden):
    ended = MachineState.GONE.value

    state = filters.MultipleChoiceFilter(
        choices=choices(MachineState),
        distinct=False,
        help_text="May be repeated. Without it, gone machines are left out.",
    )
    region = filters.CharFilter(field_name="region_id")
    provider = filters.CharFilter()
    role = filters.ChoiceFilter(choices=choices(MachineRole))
    node = filters.CharFilter(method="filter_node")

    def filter_node(self, rows: QuerySet[Machine], name: str, value: str) -> QuerySet[Machine]:
        return rows.filter(Q(runs=value) | Q(id__in=MachineSlot.objects.filter(runs=value).values("machine")))


class LayoutSerializer(WhySerializer):
    layout = serializers.CharField(
        max_length=200, allow_blank=True, help_text="NODESxDEVICES, as `8x1` or `1x4+2x2`; empty: one node."
    )
    instance_type = serializers.CharField(
        max_length=64, required=False, allow_blank=True, default="", help_text="Of each node; detected if empty."
    )
    pinned = serializers.BooleanField(
        default=False, help_text="Keep this layout even if cells wait for nodes of another size."
    )

    class Meta:
        examples = {"layout": "4x2"}


class MachineViewSet(ReadOnlyModelViewSet[Machine]):
    """Machines of every provider: joined hosts, and machines that providers launched."""

    serializer_class = MachineSerializer
    filterset_class = MachineFilter
    lookup_value_regex = r"[-\w.:@+]+"
    ordering_fields = ("id", "provider", "region", "state", "state_since", "created_at")
    watch_kind = "machine"
    measured = frozenset({"connected", "agent_version", "notices", "what"})
    aliases = ("ma",)
    columns = (
        "MACHINE=id, STATE, PROVIDER, REGION, NODE, LAYOUT, ADDRESS, TYPE=instance_type, AGENT=agent_version, "
        "SINCE=state_since:age, NOTICES"
    )

    def get_queryset(self) -> QuerySet[Machine]:
        return machines_described()

    @extend_schema(request=WhySerializer)
    @action(detail=True, methods=["post"])
    def remove(self, request: Request, id: str) -> Response:
        """Remove a machine: the cell on it is replaced first, then the machine stops, wipes its data and uninstalls
        itself. 409 for a machine of another provider, for a gone one, and for one that is leaving and connected."""
        return self.act_on_object(request, machine_remove, "machine_id")

    @extend_schema(request=LayoutSerializer)
    @action(detail=True, methods=["post"])
    def layout(self, request: Request, id: str) -> Response:
        """Divide the devices of a joined host into nodes. Its spare nodes are retired and wiped first; if only `pinned`
        differs, its nodes stay. 400 for a layout that the host cannot have. 409 for a machine of another provider, and
        for one with a node in a cell."""
        return self.act_on_object(request, machine_layout_set, "machine_id", LayoutSerializer)

    @extend_schema(request=WhySerializer)
    @action(detail=True, methods=["post"])
    def repaired(self, request: Request, id: str) -> Response:
        """State that a joined host is repaired: nodes get its devices again that a fault had put out of use. 409 if all
        of them are in use."""
        return self.act_on_object(request, machine_repaired, "machine_id")

    @extend_schema(request=WhySerializer)
    @action(detail=True, methods=["post"])
    def revoke(self, request: Request, id: str) -> Response:
        """Revoke the credentials and certificates of a machine and of its node or ingress. Their sockets are cut within
        5 s, and a joined host never returns as this machine. Repeating changes nothing."""
        return self.act_on_object(request, machine_revoke, "machine_id")


class InvitationSerializer(serializers.ModelSerializer[Invitation]):
    region = serializers.CharField(source="region_id")
    role = serializers.ChoiceField(choices=choices(MachineRole))
    instance_type = serializers.CharField(
        source="instance_type_id", allow_null=True, help_text="Null: detected by each machine's agent."
    )
    layout = serializers.CharField(help_text="How each machine is divided into nodes; empty: one node.")
    left = serializers.IntegerField(help_text="How many more machines may join.")
    state = serializers.SerializerMethodField()

    class Meta:
        model = Invitation
        fields = [
            "prefix", "region", "role", "instance_type", "layout", "count", "left", "state", "created_by", "created_at",
            "expires_at",
        ]  # fmt: skip

    @extend_schema_field(serializers.ChoiceField(choices=INVITATION_STATES))
    def get_state(self, invitation: Invitation) -> str:
        return invitation.state_at(clock.now())


class NewInvitationSerializer(InvitationSerializer):
    line = serializers.CharField(
        help_text="The command for each host. It contains the token, which is shown only once."
    )
    notices = serializers.ListField(
        child=serializers.CharField(), help_text="Problems that may prevent hosts from using the command."
    )

    class Meta(InvitationSerializer.Meta):
        fields = [*InvitationSerializer.Meta.fields, "line", "notices"]
        examples = {"line": "curl -fsSLk https://control.example.com:8443/join | sh -s -- sw_5e6f7a8b9c0d1e_0f1e2d3c"}


class InviteSerializer(StrictSerializer):
    region = serializers.CharField(max_length=64)
    count = serializers.IntegerField(min_value=1, max_value=MOST_INVITED, default=1)
    expires_in_s = serializers.IntegerField(
        min_value=60, max_value=int(LONGEST.total_seconds()), default=DEFAULT_EXPIRY_S
    )
    role = serializers.ChoiceField(choices=choices(MachineRole), default=MachineRole.NODE.value)
    instance_type = serializers.CharField(
        max_length=64,
        required=False,
        allow_blank=True,
        default="",
        help_text="Of each machine, or of each node of its layout. Detected if empty.",
    )
    layout = serializers.CharField(
        max_length=200,
        required=False,
        allow_blank=True,
        default="",
        help_text="Divides each host when it joins: NODESxDEVICES, as `8x1` or `1x4+2x2`; empty: one node.",
    )

    class Meta:
        examples = {"count": 3, "expires_in_s": 3600}

    def arguments(self) -> dict[str, Any]:
        fields = dict(self.validated_data)
        expires_in = timedelta(seconds=fields.pop("expires_in_s"))
        return {**fields, "role": MachineRole(fields["role"]), "expires_in": expires_in}


class InvitationFilter(filters.FilterSet):
    region = filters.CharFilter(field_name="region_id")


class InvitationViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet[Invitation]):
    """Invitations: permission for a number of hosts to join one region until they expire."""

    serializer_class = InvitationSerializer
    filterset_class = InvitationFilter
    lookup_field = "prefix"
    lookup_url_kwarg = "id"
    lookup_value_regex = r"[0-9a-f]{1,16}"
    page_order = "-id"
    ordering_fields = ("prefix", "region", "created_at", "expires_at")
    watch_kind = "invitation"
    shown_once = frozenset({"create"})
    aliases = ("invites",)
    columns = "PREFIX, STATE, REGION, ROLE, LEFT, EXPIRES=expires_at, BY=created_by"

    def get_queryset(self) -> QuerySet[Invitation]:
        return invitations_described()

    @extend_schema(
        operation_id="invitations_create", request=InviteSerializer, responses={200: NewInvitationSerializer}
    )
    def create(self, request: Request) -> Response:
        """Invite hosts into a region of provider `machines`. Only this response shows the join command."""
        body = InviteSerializer(data=request.data)
        body.is_valid(raise_exception=True)
        return _shown_once(invitation_create(actor=actor_of(request), now=clock.now(), **body.arguments()))

    @extend_schema(operation_id="invitations_withdraw", request=WhySerializer)
    @action(detail=True, methods=["post"])
    def withdraw(self, request: Request, id: str) -> Response:
        """Withdraw an invitation; hosts that have joined stay. 409 if it is withdrawn already."""
        payload = body_of(request, WhySerializer)
        why, prefix = payload["why"], self.get_object().prefix
        withdrawn = invitation_withdraw(prefix=prefix, actor=actor_of(request), now=clock.now(), why=why)
        return Response(self.get_serializer(withdrawn).data)


def _shown_once(new: NewInvitation) -> Response:
    line = join_line(new.text)
    return Response({**InvitationSerializer(new.invitation).data, "line": line.text, "notices": line.notices})


ROUTES = (
    ("machines/invitations", InvitationViewSet, "invitation"),
    ("machines", MachineViewSet, "machine"),
)
