import kernel.models
import kernel.tones
from django.db import migrations, models

from kernel.change_triggers import RecordChanges

_LOOPS = (
    "fleet.reconcile", "fleet.provision", "fleet.send_webhooks", "traffic.publish", "traffic.autopilot",
    "traffic.autoscale", "traffic.demand", "traffic.plan", "traffic.ensure_ingresses", "housekeeping",
    "traffic.async_requests", "traffic.batches", "traffic.batch_ranges",
)  # fmt: skip


def _begin_passes(apps, schema_editor):
    """Starts the age of every control loop at zero, so that a process that never starts is detected."""
    with schema_editor.connection.cursor() as cursor:
        for loop in _LOOPS:
            cursor.execute(
                "INSERT INTO kernel_looppass (loop, holder, passed_at, took_s, waited_s)"
                " VALUES (%s, 'migrate', clock_timestamp(), 0, 0)",
                [loop],
            )


_BY_HAND = [
    migrations.RunPython(_begin_passes),
    RecordChanges(table="kernel_event", kind="event", thing="id", key="{row}.id::text", only_new=True),
]
"""What `makemigrations` does not write."""


class Migration(migrations.Migration):

    initial = True

    dependencies = [
    ]

    operations = [
        migrations.CreateModel(
            name='ChangeHorizon',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('xid', kernel.models.TransactionIdField()),
            ],
        ),
        migrations.CreateModel(
            name='ControlHost',
            fields=[
                ('name', models.CharField(max_length=64, primary_key=True, serialize=False)),
                ('seen_at', models.DateTimeField()),
            ],
        ),
        migrations.CreateModel(
            name='Lease',
            fields=[
                ('name', models.CharField(max_length=96, primary_key=True, serialize=False)),
                ('holder', models.CharField(max_length=96)),
                ('token', models.BigIntegerField(default=1)),
                ('acquired_at', models.DateTimeField()),
                ('renewed_at', models.DateTimeField()),
                ('expires_at', models.DateTimeField()),
            ],
        ),
        migrations.CreateModel(
            name='LoopPass',
            fields=[
                ('loop', models.CharField(max_length=64, primary_key=True, serialize=False)),
                ('holder', models.CharField(max_length=96)),
                ('passed_at', models.DateTimeField()),
                ('took_s', models.FloatField(default=0.0)),
                ('waited_s', models.FloatField(default=0.0)),
            ],
        ),
        migrations.CreateModel(
            name='Change',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('kind', models.CharField(max_length=32)),
                ('thing', models.TextField()),
                ('key', models.TextField()),
                ('xid', kernel.models.TransactionIdField()),
                ('at', models.DateTimeField(db_index=True)),
            ],
            options={
                'indexes': [models.Index(fields=['kind', 'xid'], name='change_kind_xid'), models.Index(fields=['xid'], name='change_xid')],
            },
        ),
        migrations.CreateModel(
            name='Event',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField(db_index=True)),
                ('kind', models.CharField(db_index=True, max_length=64)),
                ('tone', models.CharField(choices=[('ok', 'ok'), ('moving', 'moving'), ('warn', 'warn'), ('bad', 'bad'), ('idle', 'idle'), ('bake', 'bake')], default=kernel.tones.Tone['IDLE'], max_length=8)),
                ('message', models.TextField()),
                ('actor', models.CharField(default='switchyard', max_length=64)),
                ('region', models.CharField(blank=True, max_length=64)),
                ('deployment', models.CharField(blank=True, max_length=128)),
                ('cell', models.CharField(blank=True, max_length=160)),
                ('node', models.CharField(blank=True, max_length=64)),
                ('detail', models.JSONField(blank=True, default=dict)),
            ],
            options={
                'ordering': ['-id'],
                'indexes': [models.Index(fields=['cell', '-id'], name='event_cell'), models.Index(fields=['node', '-id'], name='event_node'), models.Index(fields=['deployment', '-id'], name='event_deployment')],
            },
        ),
        migrations.CreateModel(
            name='IdempotentAnswer',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('caller', models.CharField(max_length=64)),
                ('key', models.CharField(max_length=255)),
                ('fingerprint', models.CharField(max_length=64)),
                ('status', models.PositiveIntegerField()),
                ('body', models.BinaryField(null=True)),
                ('created_at', models.DateTimeField()),
                ('expires_at', models.DateTimeField(db_index=True)),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('caller', 'key'), name='idempotent_answer_once')],
            },
        ),
        *_BY_HAND,
    ]
