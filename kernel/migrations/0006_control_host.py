from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('kernel', '0005_loop_webhooks'),
    ]

    operations = [
        migrations.CreateModel(
            name='ControlHost',
            fields=[
                ('name', models.CharField(max_length=32, primary_key=True, serialize=False)),
                ('address', models.CharField(max_length=64)),
                ('agent_url', models.CharField(max_length=400)),
                ('joined_at', models.DateTimeField()),
                ('seen_at', models.DateTimeField()),
                ('database', models.CharField(blank=True, max_length=16)),
                ('commits', models.CharField(blank=True, max_length=16)),
                ('commits_since', models.DateTimeField(null=True)),
                ('alone_after_s', models.FloatField(null=True)),
                ('lag_bytes', models.BigIntegerField(null=True)),
                ('lag_s', models.FloatField(null=True)),
                ('reached_at', models.DateTimeField(null=True)),
                ('stands_down', models.BooleanField(default=False)),
            ],
        ),
    ]
