"""Deployments list several instance types, and each cell is on one."""

import django.db.models.deletion
from django.db import migrations, models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.state import StateApps


def list_the_one(apps: StateApps, editor: BaseDatabaseSchemaEditor) -> None:
    """Each deployment lists the type that it had, and its cells are on it."""
    deployments, cells = apps.get_model("fleet", "Deployment"), apps.get_model("fleet", "Cell")
    for deployment in deployments.objects.only("name", "instance_type_id"):
        deployments.objects.filter(pk=deployment.pk).update(instance_types=[deployment.instance_type_id])
        cells.objects.filter(deployment=deployment).update(instance_type_id=deployment.instance_type_id)


def keep_the_first(apps: StateApps, editor: BaseDatabaseSchemaEditor) -> None:
    """The way back: one type is left."""
    deployments = apps.get_model("fleet", "Deployment")
    for deployment in deployments.objects.only("name", "instance_types"):
        deployments.objects.filter(pk=deployment.pk).update(instance_type_id=deployment.instance_types[0])


class Migration(migrations.Migration):
    dependencies = [("fleet", "0045_node_check")]

    operations = [
        migrations.AddField("deployment", "instance_types", models.JSONField(null=True)),
        migrations.AlterField(
            "deployment",
            "instance_type",
            models.ForeignKey(
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="deployments",
                to="fleet.instancetype",
            ),
        ),
        migrations.AddField(
            "cell",
            "instance_type",
            models.ForeignKey(
                null=True, on_delete=django.db.models.deletion.PROTECT, related_name="cells", to="fleet.instancetype"
            ),
        ),
        migrations.RunPython(list_the_one, keep_the_first),
    ]
