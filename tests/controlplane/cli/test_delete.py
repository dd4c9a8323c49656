"""The command line can delete every kind that the API can."""

import pytest

from accounts.models import Approval, Grant
from accounts.services.account_change import grant_give
from accounts.services.approval import approval_rule_set
from controlplane.cli.schema import entries_of
from fleet.regions.models import Region
from kernel.access import Role
from tests.controlplane.access.callers import make_user
from tests.controlplane.api.client import document
from tests.controlplane.cli.conftest import Switchyard
from tests.fleet import rows
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


def test_every_resource_that_can_be_deleted_has_a_name_here() -> None:
    found = {path for path, operations in document()["paths"].items() if "delete" in operations}
    assert {path.removeprefix("/api/v1/").rpartition("/")[0] for path in found} <= {
        entry["path"] for entry in entries_of(document())
    }


def test_a_region_is_deleted_once_the_user_says_so(switchyard: Switchyard) -> None:
    rows.region("eu-west-1")
    asked = switchyard("delete", "region", "eu-west-1")
    assert (asked.code, "Delete region eu-west-1 permanently?" in asked.err) == (2, True)
    assert Region.objects.filter(name="eu-west-1").exists()
    said = switchyard("delete", "region", "eu-west-1", "--yes")
    assert (said.code, said.out) == (0, "region eu-west-1 is deleted\n")
    assert not Region.objects.filter(name="eu-west-1").exists()


def test_what_is_in_use_or_does_not_exist_is_not_deleted(switchyard: Switchyard) -> None:
    rows.cell("c-1", rows.node("n-00000001"))
    used = switchyard("delete", "region", "us-east-1", "--yes")
    assert (used.code, "1 x cell (c-1)" in used.err) == (6, True)
    rows.region("eu-west-1")
    assert switchyard("delete", "region", "eu-west-1", "nowhere", "--yes").code == 4
    assert Region.objects.filter(name="eu-west-1").exists()
    assert switchyard("delete", "flower", "rose", "--yes").code == 2
    assert switchyard("delete", "cell", "c-1", "--yes").code == 3


def test_what_takes_two_people_says_so(switchyard: Switchyard) -> None:
    make_user("grace", Role.ADMIN)
    grant_give(deployment="x", role=Role.ADMIN, user="grace", actor="root", now=NOW)
    approval_rule_set(name="evacuate-region", required=True, actor="root", now=NOW)
    said = switchyard("delete", "grant", str(Grant.objects.get().pk), "--yes")
    assert (said.code, f"switchyard approve {Approval.objects.get().pk}" in said.err) == (11, True)
    assert Grant.objects.exists()
