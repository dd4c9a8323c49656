"""Searches over configurations: what is varied, each configuration, and each measurement of one."""

import django.db.models.deletion
from django.db import migrations, models

from kernel.change_triggers import RecordChanges


class Migration(migrations.Migration):

    dependencies = [
        ('models_registry', '0010_roles'),
    ]

    operations = [
        migrations.CreateModel(
            name='ConfigurationSearch',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('deployment', models.CharField(max_length=96)),
                ('region', models.CharField(max_length=64)),
                ('instance_type', models.CharField(max_length=64)),
                ('workload', models.CharField(max_length=200)),
                ('slo', models.CharField(max_length=80)),
                ('seed', models.PositiveIntegerField(default=0)),
                ('varied', models.JSONField()),
                ('rules', models.JSONField(blank=True, default=dict)),
                ('most_trials', models.PositiveIntegerField()),
                ('most_hours', models.FloatField()),
                ('state', models.CharField(choices=[('queued', 'Queued'), ('running', 'Running'), ('done', 'Done'), ('failed', 'Failed'), ('cancelled', 'Cancelled')], default='running', max_length=16)),
                ('ends_as', models.CharField(blank=True, max_length=16)),
                ('reason', models.TextField(blank=True)),
                ('found', models.TextField(blank=True)),
                ('actor', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField()),
                ('seen_at', models.DateTimeField()),
                ('ended_at', models.DateTimeField(null=True)),
                ('version', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='models_registry.modelversion')),
            ],
            options={
                'ordering': ['-id'],
            },
        ),
        migrations.CreateModel(
            name='SearchCandidate',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('number', models.PositiveIntegerField()),
                ('choice', models.JSONField()),
                ('refused', models.TextField(blank=True)),
                ('search', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='candidates', to='models_registry.configurationsearch')),
                ('version', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='models_registry.modelversion')),
            ],
            options={
                'ordering': ['search_id', 'number'],
            },
        ),
        migrations.AddField(
            model_name='configurationsearch',
            name='best',
            field=models.OneToOneField(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='models_registry.searchcandidate'),
        ),
        migrations.CreateModel(
            name='SearchTrial',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('fidelity', models.FloatField()),
                ('score', models.FloatField(null=True)),
                ('begun_at', models.DateTimeField()),
                ('benchmark', models.OneToOneField(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='trial', to='models_registry.benchmark')),
                ('candidate', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='trials', to='models_registry.searchcandidate')),
            ],
            options={
                'ordering': ['id'],
            },
        ),
        migrations.AddConstraint(
            model_name='searchcandidate',
            constraint=models.UniqueConstraint(fields=('search', 'number'), name='search_candidate_once'),
        ),
        migrations.AddConstraint(
            model_name='configurationsearch',
            constraint=models.UniqueConstraint(condition=models.Q(('state', 'running')), fields=('deployment',), name='search_running_once'),
        ),
        migrations.AddConstraint(
            model_name='searchtrial',
            constraint=models.UniqueConstraint(fields=('candidate', 'fidelity'), name='search_trial_once'),
        ),
        RecordChanges(
            table='models_registry_configurationsearch',
            kind='configuration-search',
            thing='id',
            key='{row}.id::text',
            columns=['state', 'reason', 'found'],
        ),
    ]
