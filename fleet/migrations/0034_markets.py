"""In which markets machines may be bought; of nodes that have one, in which it was."""

from django.db import migrations, models

from kernel.change_triggers import RecordChanges

BOUGHT = """
UPDATE fleet_node SET markets = jsonb_build_array(machine.market) FROM fleet_machine AS machine
WHERE machine.runs = fleet_node.id AND machine.role = 'node' AND machine.market <> ''
"""

# Of a deployment all but what numbers its cells: `slo` was forgotten when it came.
NOTED = ["model_version_id", "instance_type_id", "serving_class", "drain_deadline_s", "update_policy", "slo", "markets"]


def _markets() -> models.JSONField:
    return models.JSONField(blank=True, default=list)


class Migration(migrations.Migration):
    dependencies = [
        ("fleet", "0033_image_asked"),
    ]

    operations = [
        migrations.AddField(model_name="deployment", name="markets", field=_markets()),
        migrations.AddField(model_name="launchunit", name="markets", field=_markets()),
        migrations.AddField(model_name="node", name="markets", field=_markets()),
        migrations.RunSQL(BOUGHT, migrations.RunSQL.noop),
        migrations.RunSQL("DROP FUNCTION note_fleet_deployment_deployment() CASCADE", migrations.RunSQL.noop),
        RecordChanges(table="fleet_deployment", kind="deployment", thing="name", key="{row}.name", columns=NOTED),
        migrations.RunSQL("SET CONSTRAINTS ALL IMMEDIATE", migrations.RunSQL.noop),
    ]
