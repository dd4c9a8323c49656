"""Migrations that change stored data, on rows as they were before. What is changed of the schema is taken back with the
test's transaction."""

from datetime import UTC, datetime, timedelta
from importlib import import_module
from typing import Any

import pytest
from django.db import connection
from django.db.migrations.loader import MigrationLoader

from fleet.models import CloudNotice, Deployment
from tests.fleet import rows

pytestmark = pytest.mark.django_db

AT = datetime(2026, 11, 24, 12, 0, tzinfo=UTC)
SOON, LATER = AT + timedelta(minutes=2), AT + timedelta(minutes=30)


@pytest.fixture
def apps() -> Any:
    """Models as they were before notices were one of each kind, on a table as it was."""
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE fleet_cloudnotice ADD COLUMN event_key varchar(256) NOT NULL DEFAULT ''")
        cursor.execute("DROP INDEX notice_once")
    return MigrationLoader(connection).project_state(("fleet", "0029_prices")).apps


def test_of_doubled_notices_the_one_that_ends_first_stays_and_knows_who_said_it(apps: Any) -> None:
    for machine in ("m-00000001", "m-00000002"):
        rows.machine(machine)
    notices = apps.get_model("fleet", "CloudNotice")

    def said(machine: str, kind: str, source: str, ends_at: datetime | None, **columns: Any) -> int:
        given = {"at": AT, "event_key": f"{source} of {machine}", **columns}
        return int(notices.objects.create(machine_id=machine, kind=kind, source=source, ends_at=ends_at, **given).pk)

    endless = said("m-00000001", "interruption", "status", None)
    late = said("m-00000001", "interruption", "events", LATER)
    first = said("m-00000001", "interruption", "imds", SOON)
    other_kind = said("m-00000001", "rebalance", "events", None)
    other_machine = said("m-00000002", "interruption", "events", LATER)
    settled = said("m-00000002", "interruption", "imds", SOON, settled_at=AT)

    import_module("fleet.migrations.0030_one_notice")._merge(apps, None)

    open_ones = {row.pk: row for row in CloudNotice.objects.filter(settled_at=None)}
    assert set(open_ones) == {first, other_kind, other_machine}
    assert open_ones[first].evidence == {
        "imds": {"key": "imds of m-00000001", "at": AT.isoformat(), "ends_at": SOON.isoformat()},
        "events": {"key": "events of m-00000001", "at": AT.isoformat(), "ends_at": LATER.isoformat()},
        "status": {"key": "status of m-00000001", "at": AT.isoformat(), "ends_at": None},
    }
    assert set(open_ones[other_kind].evidence) == set(open_ones[other_machine].evidence) == {"events"}
    over = dict(CloudNotice.objects.exclude(settled_at=None).values_list("pk", "settled_at"))
    assert over == {endless: AT, late: AT, settled: AT}
    assert CloudNotice.objects.get(pk=settled).evidence == {}, "what is over stays as it was"
    with connection.cursor() as cursor:  # what the migration does next holds now
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        cursor.execute("CREATE UNIQUE INDEX one ON fleet_cloudnotice (machine_id, kind) WHERE settled_at IS NULL")


def test_a_deployment_lists_the_instance_type_that_it_had_and_its_cells_are_on_it() -> None:
    before = MigrationLoader(connection).project_state(("fleet", "0046_instance_types")).apps
    rows.cell("c1", rows.node("n-1"))
    with connection.cursor() as cursor:  # as it was between the two migrations
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        cursor.execute("ALTER TABLE fleet_deployment DROP CONSTRAINT deployment_instance_types_some")
        cursor.execute("ALTER TABLE fleet_deployment ALTER instance_types DROP NOT NULL")
        cursor.execute(f"ALTER TABLE fleet_deployment ADD instance_type_id varchar(64) DEFAULT '{rows.KIND}'")
        cursor.execute("ALTER TABLE fleet_cell ALTER instance_type_id DROP NOT NULL")
        cursor.execute("UPDATE fleet_deployment SET instance_types = NULL")
        cursor.execute("UPDATE fleet_cell SET instance_type_id = NULL")
    migration = import_module("fleet.migrations.0046_instance_types")

    migration.list_the_one(before, None)

    deployment = Deployment.objects.get()
    assert (deployment.instance_types, deployment.cells.get().instance_type_id) == ([rows.KIND], rows.KIND)
    Deployment.objects.update(instance_types=["local.big", rows.KIND])
    migration.keep_the_first(before, None)
    with connection.cursor() as cursor:
        cursor.execute("SELECT instance_type_id FROM fleet_deployment")
        assert cursor.fetchall() == [("local.big",)]
