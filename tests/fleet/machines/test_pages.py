"""Machines on the page of nodes (list, join command), on their own pages with their actions, and on a cell's page
(place, price, notices, unused pools)."""

import re
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from django.contrib.auth.models import User
from django.test import Client

from engine_agent.protocol.machine_messages import machine_id_of
from fleet.capacity.planning.pools import Market
from fleet.cells.pages.data import cell_find
from fleet.clouds.models import CapacityPool, CloudNotice
from fleet.deployments.models import Deployment
from fleet.machines.models import Invitation, Machine
from fleet.machines.pages.views import cell_machines
from fleet.machines.services.machines import join_refused, machine_enrol
from fleet.reconcile.planning.states import MachineState, NoticeKind, NoticeSource
from kernel import clock
from tests.controlplane.access.callers import make_user
from tests.controlplane.dashboard.clients import fragment, signed_in
from tests.fleet import rows
from tests.fleet.rows import KIND, NOW

pytestmark = pytest.mark.django_db

FORM = {"region": "pool", "role": "ingress", "count": "2", "valid_for_hours": "3", "instance_type": ""}


def test_the_list_shows_machines_and_what_is_odd_about_them() -> None:
    rows.machine("m-00000001")
    text = fragment(signed_in(), "/machines/", "machines")
    assert "m-00000001: Its machine agent has been silent for" in text
    assert "Add machines" in text
    assert "m-00000001" not in fragment(signed_in(), "/machines/?q=m-2", "machines")


def test_the_line_is_shown_once() -> None:
    rows.region("pool", provider="machines")
    shown = signed_in().post("/nodes/machines/add/", FORM)
    [line] = re.findall(r'<pre id="join-line" class="line" tabindex="0">(.*?)</pre>', shown.text)
    assert "/join | sh -s -- sw_" in line
    invitation = Invitation.objects.get()
    assert (invitation.role, invitation.count, invitation.left) == ("ingress", 2, 2)
    assert line.rpartition("_")[2] not in fragment(signed_in(), "/machines/", "machine-invitations")


def test_the_page_of_an_invitation_shows_hosts_as_they_join() -> None:
    rows.region("pool", provider="machines")
    client = signed_in()
    shown = client.post("/nodes/machines/add/", {**FORM, "layout": "", "role": "node"}).text
    assert "switchyard machine add --region pool --count 2 --expires 3h --role node" in shown
    invitation = Invitation.objects.get()
    page = f"/invitations/{invitation.prefix}/"
    assert f'hx-get="{page}"' in shown
    assert "0 of 2 hosts joined." in fragment(client, page, "invitation-hosts")
    [line] = re.findall(r'<pre id="join-line" class="line" tabindex="0">(.*?)</pre>', shown)
    token = line.split()[-1]
    nonce = "a" * 32
    machine_enrol(token=token, kind="machine", subject=machine_id_of(nonce), nonce=nonce, now=clock.now())
    join_refused(token=token, address="10.0.0.9", reason="<b>no disk</b>", now=clock.now())
    viewer = Client()
    viewer.force_login(make_user("viewer"))
    joined = fragment(viewer, page, "invitation-hosts")
    assert "0 of 2 hosts joined, 1 joining." in joined
    assert machine_id_of(nonce) in joined
    assert "10.0.0.9 did not join pool: &lt;b&gt;no disk&lt;/b&gt;" in joined
    Machine.objects.update(state=MachineState.POOL.value)
    assert "1 of 2 hosts joined." in fragment(viewer, page, "invitation-hosts")
    assert "Withdraw" in client.get(page).text
    whole = viewer.get(page).text
    assert "Withdraw" not in whole
    assert token.rpartition("_")[2] not in whole
    assert viewer.get("/invitations/nobody/").status_code == 404


def test_the_form_needs_a_region_that_hosts_can_join() -> None:
    rows.region("us-east-1", provider="local")
    assert "Hosts join regions of provider machines." in signed_in().get("/nodes/machines/add/").text


def test_an_invitation_is_withdrawn() -> None:
    rows.region("pool", provider="machines")
    client = signed_in()
    client.post("/nodes/machines/add/", FORM)
    prefix = Invitation.objects.get().prefix
    where = f"/nodes/invitations/{prefix}/withdraw/"
    assert where in fragment(client, "/machines/", "machine-invitations")
    client.post(where)
    assert Invitation.objects.get().withdrawn_at is not None
    assert prefix not in fragment(client, "/machines/", "machine-invitations")
    assert client.post(where).status_code == 409
    assert client.post("/nodes/invitations/nobody/withdraw/").status_code == 404


@pytest.mark.parametrize("hours", ["", "0", "169", "1.5", "ever"])
def test_an_invitation_is_valid_for_whole_hours_of_a_week(hours: str) -> None:
    rows.region("pool", provider="machines")
    refused = signed_in().post("/nodes/machines/add/", {**FORM, "valid_for_hours": hours})
    assert refused.status_code == 409
    assert "Valid for hours: " in refused.text
    assert '<option value="ingress" selected>' in refused.text
    assert 'name="count" type="number" value="2"' in refused.text
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
    text = fragment(client, "/machines/", "machines")
    assert "m-00000001" in text
    assert "This needs the operator role." in text
    assert 'href="/nodes/machines/add/"' not in text
    assert 'href="/nodes/machines/add/"' in fragment(signed_in(), "/machines/", "machines")
    assert "ask/remove/" not in fragment(client, "/machines/m-00000001/", "machine")


def test_a_machine_is_removed_by_its_name() -> None:
    rows.machine("m-00000001")
    client = signed_in()
    assert (
        "It has no node or ingress. The host is wiped and uninstalled."
        in client.get("/machines/m-00000001/ask/remove/").text
    )
    assert client.post("/machines/m-00000001/ask/remove/", {"confirm": "m-1"}).status_code == 409
    client.post("/machines/m-00000001/ask/remove/", {"confirm": "m-00000001", "why": "sold"})
    machine = Machine.objects.get()
    assert (machine.state, machine.reason) == (MachineState.LEAVING, "removed by operator: sold")
    assert client.get("/machines/m-0000000f/ask/remove/").status_code == 404


def pool(position: int, market: Market, zone: str, **columns: Any) -> CapacityPool:
    return CapacityPool.objects.create(
        region_id="us-east-1", instance_type_id=KIND, position=position, market=market, zone=zone, zone_id=zone,
        subnet="s", image="ami", **columns,
    )  # fmt: skip


@pytest.fixture
def cell() -> None:
    nodes = [rows.node(f"n-{rank}", topology=["az1", "nn-1", f"nn-2{rank}"]) for rank in (0, 1)]
    rows.cell("c1", *nodes)
    columns: dict[str, Any] = {"zone": "az1", "market": Market.SPOT, "price_per_hour": 6.5}
    for node in nodes:
        rows.machine(f"m-{node.id}", where="us-east-1", runs=node.id, state=MachineState.TAKEN, **columns)


@pytest.mark.usefixtures("cell")
def test_a_cell_shows_its_machines_and_why_each_pool_is_not_used_for_the_next() -> None:
    pool(1, Market.SPOT, "az1", paused_until=NOW + timedelta(minutes=3), pause_reason="no capacity", failures=1)
    pool(2, Market.ON_DEMAND, "az1", enabled=False)
    pool(3, Market.ON_DEMAND, "az2")
    found = cell_find(cell_id="c1", now=NOW)
    assert found is not None
    shown = cell_machines(found, NOW)
    assert [(row.zone_id, row.network_nodes) for row in shown.rows] == [
        ("az1", ("nn-1", "nn-20")),
        ("az1", ("nn-1", "nn-21")),
    ]
    assert shown.price_per_hour == 13.0
    assert [(line.name, line.is_used, line.why_not) for line in shown.pools] == [
        ("spot in az1", True, "it is paused until 2026-11-21 12:03 UTC: no capacity"),
        ("on_demand in az1", False, "a user disabled it"),
        ("on_demand in az2", False, ""),
    ]


@pytest.mark.usefixtures("cell")
def test_a_pool_of_a_market_that_the_deployment_refuses_is_not_used() -> None:
    pool(1, Market.SPOT, "az1")
    pool(2, Market.ON_DEMAND, "az1")
    Deployment.objects.update(markets=["on_demand"])
    found = cell_find(cell_id="c1", now=NOW)
    assert found is not None
    assert [line.why_not for line in cell_machines(found, NOW).pools] == ["its deployment does not use spot", ""]
    page = fragment(signed_in(), "/deployments/sim-70b/", "deployment")
    assert re.search(r"<dt>Markets</dt>\s*<dd>on_demand</dd>", page)


@pytest.mark.usefixtures("cell")
def test_the_page_says_what_was_announced() -> None:
    pool(1, Market.SPOT, "az1")
    CloudNotice.objects.create(
        machine=Machine.objects.get(runs="n-0"),
        kind=NoticeKind.REBALANCE,
        source=NoticeSource.EVENTS,
        at=NOW,
        text="soon",
    )
    page = fragment(signed_in(), "/cells/c1/", "cell-machines")
    assert "Its provider announced rebalance: soon." in page
    assert "nn-1 / nn-20" in page
    assert "13.00 $ an hour together" in page


def test_a_host_is_divided_on_its_page_and_its_nodes_are_listed() -> None:
    facts = msgspec.structs.replace(rows.FACTS, cpus=(tuple(range(8)),))
    rows.machine("m-00000001", facts=msgspec.to_builtins(facts))
    client, where = signed_in(), "/machines/m-00000001/ask/layout/"
    assert 'href="/machines/m-00000001/"' in fragment(client, "/machines/", "machines")
    assert where in fragment(client, "/machines/m-00000001/", "machine")
    assert "8 cores" in client.get(where).text
    refused = client.post(where, {"layout": "2by4"})
    assert refused.status_code == 409
    assert "must be NODESxDEVICES" in refused.text
    assert 'value="2by4"' in refused.text
    assert client.post(where, {"layout": "2x4", "instance_type": KIND}).status_code == 302
    text = fragment(client, "/machines/", "machines")
    assert "cpu 0,1,2,3; 4 CPUs; 16 GiB" in text
    assert "cpu 4,5,6,7; 4 CPUs; 16 GiB" in text
    assert client.post(where, {"layout": "2x4", "pinned": "yes"}).status_code == 302
    assert "pinned" in fragment(client, "/machines/", "machines")
    assert "cpu 4,5,6,7; 4 CPUs; 16 GiB" in fragment(client, "/machines/m-00000001/", "machine")
    assert "checked" in client.get(where).text
    client.post(where, {"layout": ""})
    assert (Machine.objects.get().layout, Machine.objects.get().layout_pinned) == ("", False)
