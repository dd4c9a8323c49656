"""The page of one region: its pools of capacity, and its actions."""

from datetime import timedelta

import pytest
from pytest_django import DjangoAssertNumQueries

from fleet.capacity.planning.pools import Market
from fleet.clouds.models import CapacityPool, CloudRegion, ImageMove
from fleet.regions.models import Region
from fleet.regions.pages import views as selector
from fleet.regions.pages.views import region_tree
from kernel import clock
from tests.controlplane.dashboard.clients import fragment, opened_in, signed_in
from tests.fleet import rows
from tests.fleet.pools import TYPE, order, pool

pytestmark = pytest.mark.django_db

PAGE = "/regions/us-east-1/"


def test_pools_stand_in_their_order_with_whoever_added_them_and_why_not() -> None:
    pool(0, paused_until=clock.now() + timedelta(hours=1), pause_reason="none left")
    pool(1, Market.SPOT, declared_by="ada", max_price=9.5)
    shown = fragment(signed_in(), PAGE, "region-pools")
    assert shown.index("on_demand in us-east-1a") < shown.index("spot in us-east-1a")
    assert "none left" in shown
    assert ">unknown</td>" in shown
    assert ">9.50</td>" in shown
    assert ">ada</td>" in shown
    assert "Try now" in shown


def test_a_region_in_no_cloud_has_none() -> None:
    rows.region("us-east-1")
    assert "no cloud provider" in fragment(signed_in(), PAGE, "region-pools")
    assert signed_in().get("/regions/mars/").status_code == 404


def test_its_forms_change_pools() -> None:
    first, second = pool(0), pool(1, zone="us-east-1b")
    client = signed_in()
    added = client.post(f"{PAGE}pools/add/", {"instance_type": TYPE, "market": "spot", "zone": "us-east-1b"})
    assert (added.status_code, added["Location"]) == (302, f"{PAGE}#region-pools")
    spot = CapacityPool.objects.get(market="spot")
    assert (spot.position, spot.max_price) == (2, None)
    ask = f"{PAGE}pools/{spot.pk}/ask"
    client.post(f"{ask}/earlier/")
    client.post(f"{ask}/earlier/")
    assert order()[0] == "spot in us-east-1b"
    client.post(f"{PAGE}pools/{first.pk}/ask/off/")
    first.refresh_from_db()
    assert not first.enabled
    client.post(f"{ask}/remove/")
    assert not CapacityPool.objects.filter(pk=spot.pk).exists()
    refused = client.post(f"{PAGE}pools/{second.pk}/ask/remove/")
    assert refused.status_code == 409
    assert "disable it instead" in refused.content.decode()


def test_images_are_shown_and_moved_and_turned_back() -> None:
    pool(0)
    pool(1, zone="us-east-1b", image="ami-2")
    client = signed_in()
    assert f"{TYPE}: ami-1, ami-2" in fragment(client, PAGE, "region-images")
    asked = client.post(
        f"{PAGE}images/move/", {"instance_type": TYPE, "image": "ami-0123456789abcdef0", "why": "newer"}
    )
    assert (asked.status_code, asked["Location"]) == (302, f"{PAGE}#region-images")
    move = ImageMove.objects.get()
    ImageMove.objects.update(state="rolling", reason="n-1 leaves")
    shown = " ".join(fragment(client, PAGE, "region-images").split())
    assert "moves to ami-0123456789abcdef0: n-1 leaves, requested by" in shown
    refused = client.post(f"{PAGE}images/move/", {"instance_type": TYPE})
    assert refused.status_code == 409
    client.post(f"{PAGE}images/{move.pk}/back/")
    assert ImageMove.objects.get().state == "back"
    shown = fragment(client, PAGE, "region-images")
    assert "Turn back" not in shown
    assert client.post(f"/regions/mars/images/{move.pk}/back/").status_code == 404


def test_a_move_that_another_tab_requested_meanwhile_is_not_replaced_unseen() -> None:
    pool(0)
    client, url = signed_in(), f"{PAGE}images/move/"
    opened = opened_in(fragment(client, PAGE, "region-images"))
    client.post(url, {"instance_type": TYPE, "image": "ami-0123456789abcdef0", "opened": opened})
    typed = {"instance_type": TYPE, "image": "ami-00000000000000000", "opened": opened}
    refused = client.post(url, typed)
    assert refused.status_code == 409
    assert "to ami-0123456789abcdef0 was requested by operator while this form was open" in refused.text
    assert f"you sent {TYPE} to ami-00000000000000000" in refused.text
    ImageMove.objects.update(state="back", ended_at=clock.now())
    assert "ended (back) while this form was open" in client.post(url, typed).text
    typed["opened"] = opened_in(fragment(client, PAGE, "region-images"))
    assert (client.post(url, typed).status_code, ImageMove.objects.count()) == (302, 2)


def test_a_pool_of_another_region_is_not_there() -> None:
    other = pool(0, region="eu-west-1")
    assert signed_in().post(f"{PAGE}pools/{other.pk}/ask/off/").status_code == 404


def test_the_tree_has_each_node_below_its_network_nodes_and_unknown_ones_apart() -> None:
    members = [rows.node(f"n-0000000{rank}", topology=["az1", "nn-1", f"nn-2{rank}"]) for rank in (0, 1)]
    rows.cell("c1", *members)
    rows.node("n-00000002", topology=["az2", "nn-9", "nn-91"], state="suspect")
    rows.node("n-00000003", topology=[], state="joining")
    rows.node("n-00000004", state="retired")
    tree = region_tree(members[0].region)
    first, second = tree.places
    assert (first.names, first.nodes) == (("az1", "nn-1"), 2)
    assert [place.names for place in first.places] == [("nn-20",), ("nn-21",)]
    assert [mark.role for mark in first.places[1].groups[0].marks] == ["follower of c1"]
    assert (second.names, second.nodes) == (("az2", "nn-9", "nn-91"), 1)
    assert [mark.node.pk for group in tree.unknown for mark in group.marks] == ["n-00000003"]
    assert (tree.drawn, tree.more) == (4, False)


def test_each_square_says_which_node_it_is_and_how_it_is() -> None:
    rows.cell("c1", rows.node("n-00000000", cordoned=True), rows.node("n-00000001"))
    shown = fragment(signed_in(), PAGE, "region-tree")
    assert 'aria-label="n-00000000 ready, cordoned, leader of c1"' in shown
    assert 'aria-label="Nodes of c1"' in shown
    assert "2 nodes" in shown


def test_a_large_region_is_drawn_in_one_query_as_far_as_can_be_read(
    monkeypatch: pytest.MonkeyPatch, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    nodes = [rows.node(f"n-{number:08x}", topology=["az1", f"nn-{number % 2}"]) for number in range(5)]
    monkeypatch.setattr(selector, "NODES_DRAWN", 4)
    with django_assert_num_queries(1):
        tree = region_tree(nodes[0].region)
    assert (tree.drawn, tree.more) == (4, True)


def test_suspects_of_garbage_collection_are_counted() -> None:
    pool(0)
    assert "suspected" not in fragment(signed_in(), PAGE, "region")
    CloudRegion.objects.update(suspects={"us-east-1/machines": {"i-1": "2027-01-01T00:00:00+00:00"}})
    assert "1 suspected" in fragment(signed_in(), PAGE, "region")


def test_its_form_names_alarms_and_other_regions_have_none() -> None:
    rows.region("us-east-1", provider="ecs")
    rows.region("here")
    client, ask = signed_in(), f"{PAGE}ask/alarms/"
    form = client.get(ask).content.decode()
    assert "also replace the machine" in form
    client.post(ask, {"warn": "node-\n  efa-  \n\n", "replace": "dead-"})
    named = [{"prefix": "node-", "replaces": False}, {"prefix": "efa-", "replaces": False}]
    assert Region.objects.get(pk="us-east-1").alarms == [*named, {"prefix": "dead-", "replaces": True}]
    assert "dead-" in fragment(client, PAGE, "region")

    refused = client.post(ask, {"warn": "node-", "replace": "node-"}, follow=True)
    assert "has the prefix" in refused.content.decode()
    client.post("/regions/here/ask/alarms/", {"warn": "node-"})
    assert Region.objects.get(pk="here").alarms == []
