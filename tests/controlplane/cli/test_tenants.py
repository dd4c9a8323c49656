"""Grants and addresses of tenants on the command line."""

import pytest

from controlplane.cli.exit_codes import ExitCode
from fleet.webhooks.models import Webhook
from tests.controlplane.cli.conftest import Switchyard
from tests.fleet.rows import NOW
from traffic.tenants.models import GrantUse, TenantGrant, TenantWebhook
from traffic.tenants.services import tenant_grant_create

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("noun", ["tenant-grant", "tenant-webhook"])
def test_an_empty_list_says_what_fills_it(switchyard: Switchyard, noun: str) -> None:
    assert f"switchyard create {noun}" in switchyard("get", noun).err


def test_a_place_is_granted_listed_and_withdrawn(switchyard: Switchyard) -> None:
    said = switchyard("create", "tenant-grant", "write", "s3://acme-batches/out", "--tenant", "acme")
    row = TenantGrant.objects.get()
    assert said.out == f"tenant-grant {row.pk} is created\n"
    assert "s3://acme-batches/out" in switchyard("get", "tenant-grants", "--where", "tenant=acme").out
    assert switchyard("delete", "tenant-grant", str(row.pk)).code == 2
    assert switchyard("delete", "tenant-grant", str(row.pk), "--yes").code == 0
    assert not TenantGrant.objects.exists()


def test_a_target_that_is_no_place_is_refused_with_the_reason(switchyard: Switchyard) -> None:
    wrong = switchyard("create", "tenant-grant", "read", "https://acme.example", "--tenant", "acme")
    assert (wrong.code, "target" in wrong.err) == (3, True)
    assert not TenantGrant.objects.exists()


def test_the_secret_of_a_webhook_is_shown_when_it_is_rotated(switchyard: Switchyard) -> None:
    switchyard("create", "webhook", "https://hooks.example.com/x", "pager")
    told = switchyard("webhook", "rotate", "pager")
    assert told.out.splitlines()[-1] == Webhook.objects.get().secret
    assert switchyard("webhook", "rotate", "other").code == ExitCode.NOT_FOUND


def test_the_secret_of_an_address_is_shown_when_it_is_created_and_when_it_is_rotated(switchyard: Switchyard) -> None:
    tenant_grant_create(tenant="acme", use=GrantUse.CALLBACK, target="app.acme.example", actor="ada", now=NOW)
    url = "https://app.acme.example/batches"
    first = switchyard("create", "tenant-webhook", url, "--tenant", "acme", "--events", "batch.completed").out.strip()
    row = TenantWebhook.objects.get()
    assert row.events == ["batch.completed"]
    second = switchyard("tenant-webhook", "rotate", str(row.pk)).out.splitlines()
    assert first.startswith("whsec_")
    assert second[1].startswith("whsec_")
    assert first != second[1]
    assert "until" in second[0]


def test_an_address_at_a_host_that_is_not_listed_is_refused(switchyard: Switchyard) -> None:
    wrong = switchyard("create", "tenant-webhook", "https://elsewhere.example/x", "--tenant", "acme")
    assert (wrong.code, "elsewhere.example" in wrong.err) == (3, True)
