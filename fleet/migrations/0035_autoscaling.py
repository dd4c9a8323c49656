"""Ranges of cells, what the autoscaler saw and decided of them, and its switch."""

import django.db.models.deletion
from django.db import migrations, models

from kernel.change_triggers import RecordChanges

NOTED = [
    "model_version_id", "instance_type_id", "serving_class", "drain_deadline_s", "update_policy", "slo", "scaling",
    "markets",
]
PLACE = ["cells", "cells_min", "cells_max"]


class Migration(migrations.Migration):

    dependencies = [
        ('fleet', '0034_markets'),
    ]

    operations = [
        migrations.CreateModel(
            name='ScalingDecision',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField()),
                ('was', models.PositiveIntegerField()),
                ('wanted', models.PositiveIntegerField()),
                ('acted', models.BooleanField()),
                ('rule', models.CharField(choices=[('utilisation', 'Utilisation'), ('queue', 'Queue'), ('objective', 'Objective'), ('autopilot', 'Autopilot'), ('forecast', 'Forecast'), ('schedule', 'Schedule'), ('min', 'Min'), ('max', 'Max'), ('budget', 'Budget'), ('agreement', 'Agreement'), ('rollout', 'Rollout'), ('unknown_load', 'Unknown load')], max_length=16)),
                ('reason', models.TextField()),
                ('load', models.JSONField(default=dict)),
                ('observed_s', models.FloatField(default=0.0)),
                ('too_few_cell_s', models.FloatField(default=0.0)),
                ('too_many_cell_s', models.FloatField(default=0.0)),
                ('in_force_cell_s', models.FloatField(default=0.0)),
            ],
            options={
                'ordering': ['-id'],
            },
        ),
        migrations.CreateModel(
            name='ScalingState',
            fields=[
                ('place', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='scaling_state', serialize=False, to='fleet.deploymentregion')),
                ('wanted', models.PositiveIntegerField()),
                ('needed', models.PositiveIntegerField(null=True)),
                ('rule', models.CharField(choices=[('utilisation', 'Utilisation'), ('queue', 'Queue'), ('objective', 'Objective'), ('autopilot', 'Autopilot'), ('forecast', 'Forecast'), ('schedule', 'Schedule'), ('min', 'Min'), ('max', 'Max'), ('budget', 'Budget'), ('agreement', 'Agreement'), ('rollout', 'Rollout'), ('unknown_load', 'Unknown load')], max_length=16)),
                ('reason', models.TextField()),
                ('acting', models.BooleanField()),
                ('load', models.JSONField(default=dict)),
                ('history', models.JSONField(default=list)),
                ('looked_at', models.DateTimeField()),
            ],
            options={
                'ordering': ['place_id'],
            },
        ),
        migrations.CreateModel(
            name='ScalingSwitch',
            fields=[
                ('name', models.CharField(default='fleet', max_length=8, primary_key=True, serialize=False)),
                ('paused', models.BooleanField()),
                ('why', models.CharField(blank=True, max_length=200)),
                ('actor', models.CharField(max_length=64)),
                ('changed_at', models.DateTimeField()),
            ],
        ),
        migrations.AddField(
            model_name='deployment',
            name='scaling',
            field=models.JSONField(blank=True, default=dict),
        ),
        migrations.AddField(
            model_name='deploymentregion',
            name='cells_max',
            field=models.PositiveIntegerField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name='deploymentregion',
            name='cells_min',
            field=models.PositiveIntegerField(blank=True, null=True),
        ),
        migrations.AddConstraint(
            model_name='deploymentregion',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('cells_max__isnull', True), ('cells_min__isnull', True)), models.Q(('cells_max__gte', models.F('cells_min')), ('cells_min__gte', 1)), _connector='OR'), name='deployment_cells_range'),
        ),
        migrations.AddField(
            model_name='scalingdecision',
            name='deployment',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='scaling_decisions', to='fleet.deployment'),
        ),
        migrations.AddField(
            model_name='scalingdecision',
            name='region',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='scaling_decisions', to='fleet.region'),
        ),
        migrations.AddIndex(
            model_name='scalingdecision',
            index=models.Index(fields=['deployment', 'region', '-id'], name='scaling_decisions_of_place'),
        ),
        migrations.RunSQL("DROP FUNCTION note_fleet_deployment_deployment() CASCADE", migrations.RunSQL.noop),
        RecordChanges(table="fleet_deployment", kind="deployment", thing="name", key="{row}.name", columns=NOTED),
        RecordChanges(
            table="fleet_deploymentregion", kind="scaling-place", thing="id", key="{row}.id::text", columns=PLACE
        ),
        RecordChanges(
            table="fleet_scalingstate",
            kind="scaling-place",
            thing="place_id",
            key="{row}.place_id::text",
            columns=["wanted", "rule", "acting"],
        ),
        RecordChanges(
            table="fleet_scalingdecision", kind="scaling-decision", thing="id", key="{row}.id::text", only_new=True
        ),
        migrations.RunSQL("SET CONSTRAINTS ALL IMMEDIATE", migrations.RunSQL.noop),
    ]
