"""Rates of machines move to the fleet, each with its id: events and clients name them by it."""

from django.db import migrations

COLUMNS = "id, kind, subject, region, value, valid_from, actor, created_at"


def _move(source: str, target: str) -> str:
    """All rows, and ids go on after the greatest that was ever given."""
    return f"""
        INSERT INTO {target} ({COLUMNS}) SELECT {COLUMNS} FROM {source};
        SELECT setval(
            pg_get_serial_sequence('{target}', 'id'), nextval(pg_get_serial_sequence('{source}', 'id')), false
        );
        DELETE FROM {source};
    """  # noqa: S608 - only names from below


class Migration(migrations.Migration):
    dependencies = [("traffic", "0019_lines_of_files"), ("fleet", "0036_rates")]
    operations = [
        migrations.RunSQL(_move("traffic_rate", "fleet_rate"), _move("fleet_rate", "traffic_rate")),
        migrations.DeleteModel(name="Rate"),
    ]
