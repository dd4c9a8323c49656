"""Who gets machines when they are short: priority and team of deployments, grants of places, and quotas of teams."""

import django.db.models.deletion
from django.db import migrations, models

from kernel.change_triggers import RecordChanges

NOTED = [
    "model_version_id", "instance_type_id", "serving_class", "drain_deadline_s", "update_policy", "slo", "scaling",
    "markets", "team", "priority", "preemptible", "preempts",
]
PLACE = ["cells", "cells_min", "cells_max", "cells_granted", "grant_reason"]

class Migration(migrations.Migration):

    dependencies = [
        ('fleet', '0036_rates'),
        ('models_registry', '0007_adapters'),
    ]

    operations = [
        migrations.CreateModel(
            name='Quota',
            fields=[
                ('name', models.CharField(max_length=130, primary_key=True, serialize=False)),
                ('team', models.SlugField(max_length=64)),
                ('machines', models.PositiveIntegerField()),
                ('borrow_most', models.PositiveIntegerField(blank=True, null=True)),
                ('changed_by', models.CharField(max_length=64)),
                ('changed_at', models.DateTimeField()),
            ],
            options={
                'ordering': ['instance_type_id', 'team'],
            },
        ),
        migrations.AddField(
            model_name='deployment',
            name='preemptible',
            field=models.BooleanField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name='deployment',
            name='preempts',
            field=models.CharField(choices=[('min', 'Min'), ('need', 'Need'), ('nothing', 'Nothing')], default='min', max_length=8),
        ),
        migrations.AddField(
            model_name='deployment',
            name='priority',
            field=models.PositiveSmallIntegerField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name='deployment',
            name='team',
            field=models.SlugField(blank=True, max_length=64),
        ),
        migrations.AddField(
            model_name='deploymentregion',
            name='cells_granted',
            field=models.PositiveIntegerField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name='deploymentregion',
            name='grant_reason',
            field=models.TextField(blank=True),
        ),
        migrations.AddField(
            model_name='deploymentregion',
            name='grant_rule',
            field=models.CharField(blank=True, choices=[('quota', 'Quota'), ('reclaim', 'Reclaim'), ('priority', 'Priority'), ('return', 'Return')], max_length=16),
        ),
        migrations.AddField(
            model_name='deploymentregion',
            name='granted_at',
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.AlterField(
            model_name='disruption',
            name='cause',
            field=models.CharField(choices=[('rollout', 'Rollout'), ('scale', 'Scale'), ('repair', 'Repair'), ('operator', 'Operator'), ('preemption', 'Preemption')], max_length=16),
        ),
        migrations.AddConstraint(
            model_name='deployment',
            constraint=models.CheckConstraint(condition=models.Q(('priority__isnull', True), ('priority__lte', 9), _connector='OR'), name='deployment_priority_most'),
        ),
        migrations.AddField(
            model_name='quota',
            name='instance_type',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='quotas', to='fleet.instancetype'),
        ),
        migrations.AddConstraint(
            model_name='quota',
            constraint=models.UniqueConstraint(fields=('team', 'instance_type'), name='quota_once_per_team_and_type'),
        ),
        migrations.RunSQL("DROP FUNCTION note_fleet_deployment_deployment() CASCADE", migrations.RunSQL.noop),
        RecordChanges(table="fleet_deployment", kind="deployment", thing="name", key="{row}.name", columns=NOTED),
        migrations.RunSQL(
            "DROP FUNCTION note_fleet_deploymentregion_scaling_place() CASCADE", migrations.RunSQL.noop
        ),
        RecordChanges(
            table="fleet_deploymentregion", kind="scaling-place", thing="id", key="{row}.id::text", columns=PLACE
        ),
        RecordChanges(table="fleet_quota", kind="quota", thing="name", key="{row}.name"),
        migrations.RunSQL("SET CONSTRAINTS ALL IMMEDIATE", migrations.RunSQL.noop),
    ]
