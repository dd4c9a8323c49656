"""What 0046 filled in is always there; PostgreSQL alters no table in the transaction that has changed its rows."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0046_instance_types")]

    operations = [
        migrations.RemoveField("deployment", "instance_type"),
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
