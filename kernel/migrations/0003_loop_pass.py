from django.db import migrations, models

LOOPS = ("fleet.reconcile", "traffic.publish", "traffic.autopilot", "traffic.ensure_ingresses", "housekeeping")


def begin(apps, schema_editor):
    """As if each had passed just now: a process that is not started after an upgrade is missed from here on."""
    with schema_editor.connection.cursor() as cursor:
        for loop in LOOPS:
            cursor.execute(
                "INSERT INTO kernel_looppass (loop, holder, passed_at, took_s, waited_s)"
                " VALUES (%s, 'migrate', clock_timestamp(), 0, 0)",
                [loop],
            )


class Migration(migrations.Migration):

    dependencies = [
        ('kernel', '0002_rest_conventions'),
    ]

    operations = [
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
        migrations.RunPython(begin, migrations.RunPython.noop),
    ]
