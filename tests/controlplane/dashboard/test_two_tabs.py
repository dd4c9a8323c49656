"""Two tabs edit the same object: the second one gets both values, and nothing is overwritten unseen."""

import re
from html import unescape
from typing import Any

import pytest
from django.contrib.auth.models import Group

from accounts.models import GroupRole
from fleet.deployments.models import Deployment
from fleet.faults.models import Incident
from fleet.quotas.models import Quota
from kernel.access import Role
from tests.controlplane.access.callers import make_user
from tests.controlplane.dashboard.clients import opened_in, signed_in
from tests.fleet import rows
from tests.fleet.deployments.test_policy_wizards import form, send, url
from tests.fleet.rows import NOW

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


@pytest.fixture
def deployment() -> Deployment:
    return rows.deployment("sim-70b")


def base(text: str) -> str:
    return unescape(re.findall(r'name="base" value="([^"]*)"', text)[0])


def policy() -> Any:
    return Deployment.objects.get().policy()


def test_the_second_tab_gets_both_values_and_chooses(deployment: Deployment) -> None:
    second = form("updates") | {"min_healthy_s": "40", "bake_s": "7"}
    assert send("updates", min_healthy_s="30").status_code == 302
    refused = signed_in().post(url("updates"), {**second, "go": "apply"})
    assert refused.status_code == 409
    assert "it is '30' now, and you have '40'" in unescape(refused.text)
    assert 'name="bake_s" type="number" value="7"' in refused.text
    assert policy().min_healthy_s == 30

    for go, kept in [("stored", "30"), ("typed", "40")]:
        chosen = signed_in().post(url("updates"), {**second, "go": go})
        assert f'name="min_healthy_s" type="number" value="{kept}"' in chosen.text
        assert "wizard-conflicts" not in chosen.text
        changed = {**second, "min_healthy_s": kept, "base": base(chosen.text), "go": "apply"}
        done = signed_in().post(url("updates"), changed)
        assert done.status_code == 302
        assert (policy().min_healthy_s, policy().bake_s) == (float(kept), 7)
        Deployment.objects.update(update_policy={"min_healthy_s": 30})


def test_a_field_that_this_tab_did_not_touch_is_not_reset(deployment: Deployment) -> None:
    second = form("updates") | {"bake_s": "7"}
    send("updates", min_healthy_s="30")
    assert signed_in().post(url("updates"), {**second, "go": "apply"}).status_code == 409
    assert policy().min_healthy_s == 30


def test_a_check_shows_the_conflict_before_the_form_is_sent(deployment: Deployment) -> None:
    second = form("updates")
    send("updates", min_healthy_s="30")
    checked = signed_in().post(url("updates"), second, headers={"HX-Request": "true"})
    assert "Keep what I typed" in checked.text


def test_a_quota_is_not_overwritten_by_a_form_that_was_opened_without_it() -> None:
    client, page, named = signed_in(), "/new/quota/", "/new/quota/?team=search&instance_type=local.cpu"
    typed = {"team": "search", "instance_type": "local.cpu", "region": "", "borrow_most": "", "go": "apply"}
    empty = base(client.get(page).text)
    assert client.post(page, {**typed, "machines": "4", "base": empty}).status_code == 302
    refused = client.post(page, {**typed, "machines": "6", "base": empty})
    assert "Machines is set already: it is '4' now, and you have '6'" in unescape(refused.text)
    opened = base(client.get(named).text)
    assert client.post(page, {**typed, "machines": "6", "base": opened}).status_code == 302
    refused = client.post(page, {**typed, "machines": "9", "base": opened})
    assert "Machines was changed while this form was open: it is '6' now" in unescape(refused.text)
    kept = client.post(page, {**typed, "machines": "9", "base": opened, "go": "typed"})
    assert client.post(page, {**typed, "machines": "9", "base": base(kept.text)}).status_code == 302
    assert Quota.objects.get().machines == 9


@pytest.mark.parametrize("base", ["", "null", "[]", "{", '{"min_healthy_s": 5}', '{"other": "x"}'])
def test_an_odd_base_is_no_error(deployment: Deployment, base: str) -> None:
    assert send("updates", base=base).status_code in {302, 409}


def test_rows_are_compared_as_a_whole(deployment: Deployment) -> None:
    second = form("autoscaling") | {"regions-0-cells": "4"}
    send("autoscaling", **{"regions-0-cells": "2-8"})
    refused = signed_in().post(url("autoscaling"), {**second, "go": "apply"})
    assert "it is 'us-east-1, 2-8' now, and you have 'us-east-1, 4'" in unescape(refused.text)


def seen(text: str) -> str:
    return unescape(re.findall(r'name="seen" value="([^"]*)"', text)[0])


def test_an_owner_is_not_replaced_unseen() -> None:
    row = Incident.objects.create(kind="silent-node", subject="n-2", node="n-2", summary="silent", opened_at=NOW)
    for name in ("ann", "ben"):
        make_user(name, Role.OPERATOR)
    client, page = signed_in(), f"/incidents/{row.pk}/ask/assign/"
    opened = seen(client.get(page).text)
    assert client.post(page, {"owner": "ann", "seen": opened}).status_code == 302
    refused = client.post(page, {"owner": "ben", "seen": opened})
    assert refused.status_code == 409
    assert "owner is ann now; it was empty, and you sent ben" in refused.text
    assert client.post(page, {"owner": "ben", "seen": seen(refused.text)}).status_code == 302
    row.refresh_from_db()
    assert row.owner == "ben"


@pytest.mark.parametrize("odd", ["{", "[]", "7", '{"owner": [1]}', '{"nothing": "x"}'])
def test_odd_values_that_a_form_claims_to_have_seen_are_no_error(odd: str) -> None:
    row = Incident.objects.create(kind="silent-node", subject="n-2", node="n-2", summary="silent", opened_at=NOW)
    make_user("ann", Role.OPERATOR)
    answer = signed_in().post(f"/incidents/{row.pk}/ask/assign/", {"owner": "ann", "seen": odd})
    assert answer.status_code in {302, 409}


def test_a_group_keeps_the_role_that_another_tab_gave_it() -> None:
    GroupRole.objects.create(group=Group.objects.create(name="desk"), role=Role.VIEWER)
    client, change = signed_in(), "/settings/groups/desk/change/"
    opened = seen(client.get("/settings/groups/").text)
    assert client.post(change, {"role": "operator", "claim": "", "seen": opened}).status_code == 302
    refused = client.post(change, {"role": "admin", "claim": "", "seen": opened})
    assert "role is operator now; it was viewer, and you sent admin" in refused.text
    assert GroupRole.objects.get().role == Role.OPERATOR


def test_cells_are_not_scaled_from_an_outdated_number(deployment: Deployment) -> None:
    client, page = signed_in(), "/deployments/sim-70b/scale/"
    opened = seen(client.get(page, {"cells-us-east-1": "3"}).text)
    fields = {"cells-us-east-1": "3", "confirm": "sim-70b", "seen": opened}
    assert client.post(page, {**fields, "cells-us-east-1": "2"}).status_code == 302
    assert client.post(page, fields).status_code == 409


def test_forms_that_choose_their_object_do_not_overwrite_a_newer_value() -> None:
    rows.deployment("sim-70b")
    for page, act, fields, name, message in (
        (
            "/usage/",
            "/usage/budgets/set/",
            {"tenant": "acme", "unit": "usd"},
            "limit",
            "tenant acme (usd) was set to 1200",
        ),
        (
            "/usage/costs/",
            "/usage/costs/rates/set/",
            {"kind": "prompt_price", "subject": "sim-70b"},
            "value",
            "was set to 1200",
        ),
    ):
        client = signed_in()
        late = opened_in(client.get(page).text)
        assert client.post(act, {**fields, name: "1200", "opened": late}).status_code == 302
        refused = client.post(act, {**fields, name: "900", "opened": late})
        assert refused.status_code == 409
        assert message in refused.text
        assert "you sent 900" in refused.text
        for odd in ("", "yesterday", "2026-01-01"):
            assert client.post(act, {**fields, name: "900", "opened": odd}).status_code in {302, 409}
