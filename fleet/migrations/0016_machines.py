import django.db.models.deletion
from django.db import migrations, models

from kernel.change_triggers import RecordChanges


def of_nodes(apps, schema_editor):
    """A machine for each node that its provider launched before there were rows of machines."""
    with schema_editor.connection.cursor() as cursor:
        cursor.execute("""
            INSERT INTO fleet_machine (id, provider, provider_id, region_id, role, state, reason, runs, leaving,
                address, type_stated, nonce_digest, agent_version, connected, connection, phase, agent_reason,
                desired_version, instance_type_id, created_at, state_since)
            SELECT 'm-' || right(node.id, -2), region.provider, node.id, region.name, 'node', 'taken',
                'it is ' || node.id, node.id, false, '', false, '', '', false, '', '', '', 1, node.instance_type_id,
                node.created_at, node.state_since
            FROM fleet_node AS node JOIN fleet_region AS region ON region.name = node.region_id
            WHERE node.state <> 'retired' AND node.id LIKE 'n-%'
        """)


class Migration(migrations.Migration):

    dependencies = [
        ('kernel', '0002_rest_conventions'),
        ('fleet', '0015_authority'),
    ]

    operations = [
        migrations.AlterField(
            model_name='agentcredential',
            name='kind',
            field=models.CharField(choices=[('node', 'Node'), ('ingress', 'Ingress'), ('machine', 'Machine')], max_length=16),
        ),
        migrations.AlterField(
            model_name='jointoken',
            name='kind',
            field=models.CharField(choices=[('node', 'Node'), ('ingress', 'Ingress'), ('machine', 'Machine')], max_length=16),
        ),
        migrations.CreateModel(
            name='Invitation',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('prefix', models.CharField(max_length=16, unique=True)),
                ('digest', models.CharField(max_length=64)),
                ('role', models.CharField(choices=[('node', 'Node'), ('ingress', 'Ingress')], max_length=16)),
                ('count', models.PositiveIntegerField()),
                ('left', models.PositiveIntegerField()),
                ('created_by', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField()),
                ('expires_at', models.DateTimeField()),
                ('instance_type', models.ForeignKey(null=True, on_delete=django.db.models.deletion.CASCADE, related_name='invitations', to='fleet.instancetype')),
                ('region', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='invitations', to='fleet.region')),
            ],
            options={
                'ordering': ['-id'],
            },
        ),
        migrations.CreateModel(
            name='Machine',
            fields=[
                ('id', models.CharField(max_length=32, primary_key=True, serialize=False)),
                ('provider', models.CharField(max_length=32)),
                ('provider_id', models.CharField(max_length=64)),
                ('role', models.CharField(choices=[('node', 'Node'), ('ingress', 'Ingress')], default='node', max_length=16)),
                ('state', models.CharField(choices=[('joining', 'Joining'), ('pool', 'Pool'), ('taken', 'Taken'), ('wiping', 'Wiping'), ('leaving', 'Leaving'), ('gone', 'Gone')], max_length=16)),
                ('reason', models.TextField(blank=True)),
                ('runs', models.CharField(blank=True, max_length=64)),
                ('leaving', models.BooleanField(default=False)),
                ('address', models.CharField(blank=True, max_length=64)),
                ('port_base', models.PositiveIntegerField(null=True)),
                ('type_stated', models.BooleanField(default=False)),
                ('nonce_digest', models.CharField(blank=True, max_length=64)),
                ('facts', models.JSONField(null=True)),
                ('agent_version', models.CharField(blank=True, max_length=32)),
                ('connected', models.BooleanField(default=False)),
                ('connection', models.CharField(blank=True, max_length=40)),
                ('last_seen_at', models.DateTimeField(null=True)),
                ('phase', models.CharField(blank=True, max_length=16)),
                ('agent_reason', models.TextField(blank=True)),
                ('desired_version', models.BigIntegerField(default=1)),
                ('created_at', models.DateTimeField()),
                ('state_since', models.DateTimeField()),
                ('instance_type', models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='machines', to='fleet.instancetype')),
                ('invitation', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='machines', to='fleet.invitation')),
                ('region', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='machines', to='fleet.region')),
            ],
            options={
                'ordering': ['region_id', 'id'],
                'indexes': [models.Index(fields=['provider', 'region', 'state'], name='machine_pool')],
                'constraints': [models.UniqueConstraint(condition=models.Q(models.Q(('runs', ''), _negated=True), models.Q(('state', 'gone'), _negated=True)), fields=('runs',), name='machine_runs_once')],
            },
        ),
        RecordChanges(table='fleet_invitation', kind='invitation', thing='id', key='{row}.prefix'),
        RecordChanges(
            table='fleet_machine',
            kind='machine',
            thing='id',
            key='{row}.id',
            columns=['state', 'runs', 'leaving', 'address', 'instance_type_id', 'agent_version', 'connected', 'phase'],
        ),
        migrations.RunPython(of_nodes, migrations.RunPython.noop),
    ]
