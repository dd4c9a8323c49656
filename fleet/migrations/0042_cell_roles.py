"""Roles of cells, how many of each a place should have, and what the planner of roles last saw."""

import django.db.models.deletion
from django.db import migrations, models

from kernel.change_triggers import RecordChanges

PLACE = ["cells", "prefill", "decode", "cells_min", "cells_max", "cells_granted", "grant_reason"]


class Migration(migrations.Migration):

    dependencies = [
        ('fleet', '0041_capacity_plan'),
    ]

    operations = [
        migrations.CreateModel(
            name='RoleState',
            fields=[
                ('place', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='role_state', serialize=False, to='fleet.deploymentregion')),
                ('mixed', models.PositiveIntegerField()),
                ('prefill', models.PositiveIntegerField()),
                ('decode', models.PositiveIntegerField()),
                ('needed_prefill', models.PositiveIntegerField(null=True)),
                ('needed_decode', models.PositiveIntegerField(null=True)),
                ('carries', models.FloatField(null=True)),
                ('mixed_carries', models.FloatField(null=True)),
                ('rule', models.CharField(choices=[('demand', 'Demand'), ('short_prompts', 'Short prompts'), ('handover', 'Handover'), ('no_gain', 'No gain'), ('too_few', 'Too few'), ('rollout', 'Rollout'), ('hysteresis', 'Hysteresis'), ('unknown', 'Unknown')], max_length=16)),
                ('reason', models.TextField()),
                ('acting', models.BooleanField()),
                ('figures', models.JSONField(default=dict)),
                ('counted', models.JSONField(default=dict)),
                ('looked_at', models.DateTimeField()),
            ],
            options={
                'ordering': ['place_id'],
            },
        ),
        migrations.AddField(
            model_name='cell',
            name='role',
            field=models.CharField(choices=[('mixed', 'Mixed'), ('prefill', 'Prefill'), ('decode', 'Decode')], default='mixed', max_length=8),
        ),
        migrations.AddField(
            model_name='deploymentregion',
            name='decode',
            field=models.PositiveIntegerField(default=0),
        ),
        migrations.AddField(
            model_name='deploymentregion',
            name='prefill',
            field=models.PositiveIntegerField(default=0),
        ),
        migrations.AlterField(
            model_name='disruption',
            name='cause',
            field=models.CharField(choices=[('rollout', 'Rollout'), ('scale', 'Scale'), ('repair', 'Repair'), ('operator', 'Operator'), ('preemption', 'Preemption'), ('role', 'Role')], max_length=16),
        ),
        migrations.AlterField(
            model_name='scalingdecision',
            name='rule',
            field=models.CharField(choices=[('utilisation', 'Utilisation'), ('queue', 'Queue'), ('objective', 'Objective'), ('autopilot', 'Autopilot'), ('forecast', 'Forecast'), ('plan', 'Plan'), ('roles', 'Roles'), ('waiting', 'Waiting'), ('backlog', 'Backlog'), ('arrivals', 'Arrivals'), ('schedule', 'Schedule'), ('min', 'Min'), ('max', 'Max'), ('budget', 'Budget'), ('idle', 'Idle'), ('agreement', 'Agreement'), ('rollout', 'Rollout'), ('unknown_load', 'Unknown load')], max_length=16),
        ),
        migrations.AlterField(
            model_name='scalingstate',
            name='rule',
            field=models.CharField(choices=[('utilisation', 'Utilisation'), ('queue', 'Queue'), ('objective', 'Objective'), ('autopilot', 'Autopilot'), ('forecast', 'Forecast'), ('plan', 'Plan'), ('roles', 'Roles'), ('waiting', 'Waiting'), ('backlog', 'Backlog'), ('arrivals', 'Arrivals'), ('schedule', 'Schedule'), ('min', 'Min'), ('max', 'Max'), ('budget', 'Budget'), ('idle', 'Idle'), ('agreement', 'Agreement'), ('rollout', 'Rollout'), ('unknown_load', 'Unknown load')], max_length=16),
        ),
        migrations.AddConstraint(
            model_name='deploymentregion',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('decode', 0), ('prefill', 0)), models.Q(('decode__gt', 0), ('prefill__gt', 0)), _connector='OR'), name='deployment_roles_in_pairs'),
        ),
        migrations.RunSQL(
            "DROP FUNCTION note_fleet_deploymentregion_scaling_place() CASCADE", migrations.RunSQL.noop
        ),
        RecordChanges(
            table="fleet_deploymentregion", kind="scaling-place", thing="id", key="{row}.id::text", columns=PLACE
        ),
        migrations.RunSQL("SET CONSTRAINTS ALL IMMEDIATE", migrations.RunSQL.noop),
    ]
