"""Places in S3 and addresses of tenants on the command line."""

import pytest

from tests.controlplane.cli.conftest import Switchyard
from tests.fleet.rows import NOW
from traffic.models import TenantGrant, TenantWebhook
from traffic.models.tenant_access import GrantUse
from traffic.services.tenant_grant import tenant_grant_create

pytestmark = pytest.mark.django_db


def test_an_empty_list_says_what_fills_it(switchyard: Switchyard) -> None:
    assert "switchyard tenant-webhook add TENANT" in switchyard("tenant-webhook", "list").err


def test_a_place_is_granted_listed_and_withdrawn(switchyard: Switchyard) -> None:
    said = switchyard("tenant-grant", "add", "acme", "write", "s3://acme-batches/out")
    row = TenantGrant.objects.get()
    assert said.out == f"{row.pk}: acme write s3://acme-batches/out\n"
    assert "s3://acme-batches/out" in switchyard("get", "tenant-grants", "--where", "tenant=acme").out
    assert switchyard("delete", "tenant-grant", str(row.pk), "--yes").code == 0
    assert not TenantGrant.objects.exists()


def test_a_target_that_is_no_place_is_refused_with_the_reason(switchyard: Switchyard) -> None:
    wrong = switchyard("tenant-grant", "add", "acme", "read", "https://acme.example")
    assert (wrong.code, "target" in wrong.err) == (3, True)
    assert not TenantGrant.objects.exists()


def test_an_address_is_told_has_its_secret_changed_and_is_told_no_more(switchyard: Switchyard) -> None:
    tenant_grant_create(tenant="acme", use=GrantUse.CALLBACK, target="app.acme.example", actor="ada", now=NOW)
    url = "https://app.acme.example/batches"
    first = switchyard("tenant-webhook", "add", "acme", url, "--event", "batch.completed").out.splitlines()
    row = TenantWebhook.objects.get()
    assert first[0] == f"{row.pk}: https://app.acme.example/… is told of batch.completed"
    second = switchyard("tenant-webhook", "rotate", str(row.pk)).out.splitlines()
    assert first[1].startswith("whsec_")
    assert second[1].startswith("whsec_")
    assert first[1] != second[1]
    assert "until" in second[0]
    assert "app.acme.example" in switchyard("tenant-webhook", "list").out
    assert "no more" in switchyard("tenant-webhook", "remove", str(row.pk), "--yes").out
    assert not TenantWebhook.objects.exists()


def test_an_address_at_a_host_that_nobody_listed_is_refused(switchyard: Switchyard) -> None:
    wrong = switchyard("tenant-webhook", "add", "acme", "https://elsewhere.example/x")
    assert (wrong.code, "elsewhere.example" in wrong.err) == (3, True)
