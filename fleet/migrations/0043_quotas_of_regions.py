"""Quotas of teams in a region, beside those over all."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('fleet', '0042_cell_roles'),
    ]

    operations = [
        migrations.AlterModelOptions(name='quota', options={'ordering': ['instance_type_id', 'team', 'name']}),
        migrations.RemoveConstraint(model_name='quota', name='quota_once_per_team_and_type'),
        migrations.AlterField(
            model_name='quota', name='name', field=models.CharField(max_length=200, primary_key=True, serialize=False)
        ),
        migrations.AddField(
            model_name='quota',
            name='region',
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.CASCADE,
                related_name='quotas',
                to='fleet.region',
            ),
        ),
        migrations.AddConstraint(
            model_name='quota',
            constraint=models.UniqueConstraint(
                fields=('team', 'instance_type', 'region'),
                name='quota_once_per_team_type_region',
                nulls_distinct=False,
            ),
        ),
    ]
