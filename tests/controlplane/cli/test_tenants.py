"""Places in S3 and addresses of tenants on the command line."""

import pytest

from tests.controlplane.cli.conftest import Switchyard
from tests.fleet.rows import NOW
from traffic.models import BucketGrant, TenantWebhook
from traffic.services.callback_host import callback_host_allow

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("noun", ["bucket-grant", "tenant-webhook"])
def test_an_empty_list_says_what_fills_it(switchyard: Switchyard, noun: str) -> None:
    assert f"switchyard {noun} add TENANT" in switchyard(noun, "list").err


def test_a_place_is_granted_listed_and_taken_away(switchyard: Switchyard) -> None:
    said = switchyard("bucket-grant", "add", "acme", "s3://acme-batches/out", "--no-read", "--write")
    row = BucketGrant.objects.get()
    assert said.out == f"{row.pk}: batches of acme may write s3://acme-batches/out\n"
    assert (row.may_read, row.may_write) == (False, True)
    assert "s3://acme-batches/out" in switchyard("bucket-grant", "list", "--tenant", "acme").out
    assert switchyard("bucket-grant", "list", "--tenant", "other").out == ""
    assert switchyard("bucket-grant", "remove", str(row.pk)).code == 2
    assert switchyard("bucket-grant", "remove", str(row.pk), "--yes").out == (
        "batches of acme may use s3://acme-batches/out no more\n"
    )
    assert not BucketGrant.objects.exists()


def test_what_is_no_place_is_refused_with_what_is_wrong(switchyard: Switchyard) -> None:
    wrong = switchyard("bucket-grant", "add", "acme", "https://acme.example")
    assert (wrong.code, "uri" in wrong.err) == (3, True)
    assert not BucketGrant.objects.exists()


def test_an_address_is_told_has_its_secret_changed_and_is_told_no_more(switchyard: Switchyard) -> None:
    callback_host_allow(tenant="acme", host="app.acme.example", actor="ada", now=NOW)
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
