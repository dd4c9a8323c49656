"""What 0046 filled in is always there; PostgreSQL alters no table in the transaction that has changed its rows."""

import django.db.models.deletion
from django.db import migrations, models

from kernel.change_triggers import RecordChanges

NOTED = [
    "model_version_id", "instance_types", "serving_class", "drain_deadline_s", "update_policy", "slo", "scaling",
    "markets", "team", "priority", "preemptible", "preempts",
]  # fmt: skip


class Migration(migrations.Migration):
    dependencies = [("fleet", "0046_instance_types")]

    operations = [
        # The column takes the trigger with it that names it.
        migrations.RunSQL("DROP FUNCTION note_fleet_deployment_deployment() CASCADE", migrations.RunSQL.noop),
        migrations.RemoveField("deployment", "instance_type"),
        RecordChanges(table="fleet_deployment", kind="deployment", thing="name", key="{row}.name", columns=NOTED),
        migrations.AlterField("deployment", "instance_types", models.JSONField()),
        migrations.AddConstraint(
            "deployment",
            models.CheckConstraint(
                condition=models.Q(instance_types__0__isnull=False), name="deployment_instance_types_some"
            ),
        ),
        migrations.AlterField(
            "cell",
            "instance_type",
            models.ForeignKey(
                on_delete=django.db.models.deletion.PROTECT, related_name="cells", to="fleet.instancetype"
            ),
        ),
        migrations.AddField("deploymentregion", "by_type", models.JSONField(blank=True, default=dict)),
    ]
