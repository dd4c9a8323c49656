"""How far batches were over time."""

import django.contrib.postgres.fields
import django.db.models.deletion
from django.db import migrations, models


def counts():
    return django.contrib.postgres.fields.ArrayField(
        base_field=models.PositiveIntegerField(null=True), default=list, size=None
    )


class Migration(migrations.Migration):

    dependencies = [
        ('traffic', '0025_withheld_cells'),
    ]

    operations = [
        migrations.CreateModel(
            name='BatchTimeline',
            fields=[
                (
                    'batch',
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE,
                        primary_key=True,
                        related_name='samples',
                        serialize=False,
                        to='traffic.batch',
                    ),
                ),
                ('step_s', models.PositiveIntegerField(default=30)),
                ('completed', counts()),
                ('failed', counts()),
            ],
        ),
    ]
