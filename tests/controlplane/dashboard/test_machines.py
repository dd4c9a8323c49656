"""Machines on the page of nodes: the list, the line that joins hosts, and a machine that is removed."""

import re

import pytest
from django.contrib.auth.models import User
from django.test import Client

from fleet.models import Invitation, Machine
from fleet.planning.states import MachineState
from tests.controlplane.access.callers import make_user
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.fleet import rows

pytestmark = pytest.mark.django_db

FORM = {"region": "pool", "role": "ingress", "count": "2", "valid_for_hours": "3", "instance_type": ""}


def test_the_list_shows_machines_and_what_is_odd_about_them() -> None:
    rows.machine("m-00000001")
    text = fragment(signed_in(), "/nodes/", "machines")
    assert "m-00000001: Its machine agent has been silent for" in text
    assert "Add machines" in text


def test_the_line_is_shown_once() -> None:
    rows.region("pool", provider="machines")
    shown = signed_in().post("/nodes/machines/add/", FORM)
    [line] = re.findall(r'<pre id="join-line" class="line">(.*?)</pre>', shown.text)
    assert "/join | sh -s -- sw_" in line
    invitation = Invitation.objects.get()
    assert (invitation.role, invitation.count, invitation.left) == ("ingress", 2, 2)
    assert line.rpartition("_")[2] not in fragment(signed_in(), "/nodes/", "machines")


def test_an_invitation_is_withdrawn() -> None:
    rows.region("pool", provider="machines")
    client = signed_in()
    client.post("/nodes/machines/add/", FORM)
    prefix = Invitation.objects.get().prefix
    where = f"/nodes/invitations/{prefix}/withdraw/"
    assert where in fragment(client, "/nodes/", "machines")
    client.post(where)
    assert Invitation.objects.get().withdrawn_at is not None
    assert prefix not in fragment(client, "/nodes/", "machines")
    assert client.post(where).status_code == 409
    assert client.post("/nodes/invitations/nobody/withdraw/").status_code == 404


@pytest.mark.parametrize("hours", ["", "0", "169", "1.5", "ever"])
def test_an_invitation_is_valid_for_whole_hours_of_a_week(hours: str) -> None:
    rows.region("pool", provider="machines")
    refused = signed_in().post("/nodes/machines/add/", {**FORM, "valid_for_hours": hours})
    assert refused.status_code == 409
    assert "Valid for hours: " in refused.text
    assert not Invitation.objects.exists()


def test_what_makes_no_sense_is_said() -> None:
    refused = signed_in().post("/nodes/machines/add/", {**FORM, "region": "nowhere"})
    assert refused.status_code == 409
    assert "here is no region &#x27;nowhere&#x27;" in refused.text
    assert not Invitation.objects.exists()


def test_a_viewer_sees_no_form() -> None:
    rows.machine("m-00000001")
    viewer: User = make_user("viewer")
    client = Client()
    client.force_login(viewer)
    text = fragment(client, "/nodes/", "machines")
    assert "m-00000001" in text
    assert "Add machines" not in text
    assert ">Remove" not in text


def test_a_machine_is_removed_by_its_name() -> None:
    rows.machine("m-00000001")
    client = signed_in()
    assert (
        "It runs nothing. The host is wiped and uninstalled." in client.get("/nodes/machines/m-00000001/remove/").text
    )
    assert client.post("/nodes/machines/m-00000001/remove/", {"confirm": "m-1"}).status_code == 409
    client.post("/nodes/machines/m-00000001/remove/", {"confirm": "m-00000001", "why": "sold"})
    machine = Machine.objects.get()
    assert (machine.state, machine.reason) == (MachineState.LEAVING, "removed by operator: sold")
    assert client.get("/nodes/machines/m-0000000f/remove/").status_code == 404
