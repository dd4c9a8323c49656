"""`switchyard create` accepts the fields of the API."""

import json
from pathlib import Path

import pytest

from controlplane.cli.schema import entries_of
from fleet.quotas.models import Quota
from fleet.regions.models import Region
from tests.controlplane.api.client import document
from tests.controlplane.cli.conftest import Switchyard
from tests.fleet import rows

pytestmark = [pytest.mark.django_db, pytest.mark.slow]


def test_whatever_the_api_creates_is_listed_with_what_it_does(switchyard: Switchyard) -> None:
    shown = switchyard("create", "--help")
    assert shown.code == 0
    listed = {line.split()[0] for line in shown.out.splitlines() if line.startswith("  ") and line.split()[1:]}
    assert {entry["names"][1] for entry in entries_of(document()) if "fields" in entry} <= listed
    assert "Create a tenant grant." in shown.out


def test_required_fields_are_arguments_and_others_options(switchyard: Switchyard) -> None:
    shown = switchyard("create", "quota", "--help").out
    assert "{TEAM} {INSTANCE_TYPE} {MACHINES}" in shown
    assert "--borrow-most" in shown
    assert "Maximum machines to borrow" in shown
    rows.node("n-00000001")
    made = switchyard("create", "quota", "search", "local.cpu", "4", "--borrow-most", "2")
    assert (made.code, made.out) == (0, "quota search:local.cpu is created\n"), made.err
    row = Quota.objects.get()
    assert (row.machines, row.borrow_most) == (4, 2)


def test_programs_get_the_whole_answer(switchyard: Switchyard) -> None:
    made = switchyard("create", "region", "eu-west-1", "--position", "2", "-o", "json")
    assert json.loads(made.out)["position"] == 2
    assert switchyard("create", "region", "eu-west-2", "-o", "name").out == "eu-west-2\n"
    assert Region.objects.count() == 2


def test_objects_are_names_and_values_or_json(switchyard: Switchyard, tmp_path: Path) -> None:
    rows.node("n-00000001")
    assert switchyard("create", "region", "eu-west-1", "--spares", "local.cpu=2").code == 0
    (tmp_path / "spares.json").write_text('{"local.cpu": 3}')
    assert switchyard("create", "region", "eu-west-2", "--spares", f"@{tmp_path}/spares.json").code == 0
    kept = [
        json.loads(switchyard("get", "region", name, "-o", "json").out)["spares"] for name in ("eu-west-1", "eu-west-2")
    ]
    assert kept == [{"local.cpu": 2}, {"local.cpu": 3}]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("flower", "rose"), 2, "unknown kind 'flower'"),
        (("cell", "c-1"), 2, "cells cannot be created"),
        (("region",), 2, "Missing argument 'NAME'"),
        (("region", "eu-west-1", "--position", "near"), 2, "Invalid value for '--position'"),
        (("region", "eu-west-1", "--spares", "{"), 2, "is not JSON"),
        (("region", "eu-west-1", "--ingress-url", "@/nowhere"), 2, "cannot read /nowhere"),
        (("region", "eu west"), 3, "name:"),
    ],
)
def test_what_is_not_accepted_says_why(
    switchyard: Switchyard, arguments: tuple[str, ...], code: int, message: str
) -> None:
    ended = switchyard("create", *arguments)
    assert (ended.code, message in ended.err) == (code, True), ended.err
    assert not Region.objects.exists()
