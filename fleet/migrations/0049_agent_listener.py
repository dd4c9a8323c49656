"""Web processes state whether they keep up with agents' reports, and each report names the one that received it."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('fleet', '0048_handover_length'),
    ]

    operations = [
        migrations.CreateModel(
            name='AgentListener',
            fields=[
                ('id', models.CharField(max_length=16, primary_key=True, serialize=False)),
                ('since', models.DateTimeField(null=True)),
                ('until', models.DateTimeField()),
            ],
        ),
        migrations.AddField(
            model_name='nodereport',
            name='listener',
            field=models.CharField(blank=True, default='', max_length=16),
            preserve_default=False,
        ),
    ]
