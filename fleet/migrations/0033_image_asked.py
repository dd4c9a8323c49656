from django.db import migrations, models

from kernel.change_triggers import RecordChanges

STATES = [
    ("asked", "Asked"), ("canary", "Canary"), ("rolling", "Rolling"), ("back", "Back"), ("done", "Done"),
    ("refused", "Refused"),
]  # fmt: skip


class Migration(migrations.Migration):
    dependencies = [
        ("fleet", "0032_cordoned_for_notice"),
    ]

    operations = [
        migrations.AlterField(
            model_name="imagemove",
            name="image",
            field=models.CharField(blank=True, max_length=32),
        ),
        migrations.AlterField(
            model_name="imagemove",
            name="state",
            field=models.CharField(choices=STATES, default="asked", max_length=16),
        ),
        RecordChanges(table="fleet_imagemove", kind="image-move", thing="id", key="{row}.id::text"),
    ]
