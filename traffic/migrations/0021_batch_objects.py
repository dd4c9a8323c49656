"""Places in S3 and addresses of tenants for their batches; what a batch knows of its objects and its pace."""

import traffic.models.batch_access
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('fleet', '0035_autoscaling'),
        ('traffic', '0020_rates_to_fleet'),
    ]

    operations = [
        migrations.CreateModel(
            name='BucketGrant',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('tenant', models.CharField(blank=True, max_length=64)),
                ('bucket', models.CharField(max_length=63)),
                ('prefix', models.CharField(blank=True, max_length=900)),
                ('region', models.CharField(max_length=32)),
                ('may_read', models.BooleanField()),
                ('may_write', models.BooleanField()),
                ('actor', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField()),
            ],
            options={
                'ordering': ['tenant', 'bucket', 'prefix'],
            },
        ),
        migrations.CreateModel(
            name='TenantWebhook',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('tenant', models.CharField(blank=True, max_length=64)),
                ('url', models.CharField(max_length=500)),
                ('events', models.JSONField(blank=True, default=list)),
                ('secret', models.CharField(default=traffic.models.batch_access.new_signing_secret, max_length=64)),
                ('former_secret', models.CharField(blank=True, max_length=64)),
                ('former_until', models.DateTimeField(null=True)),
                ('actor', models.CharField(max_length=64)),
                ('created_at', models.DateTimeField()),
            ],
            options={
                'ordering': ['tenant', 'id'],
            },
        ),
        migrations.AddField(
            model_name='batch',
            name='at_risk_at',
            field=models.DateTimeField(null=True),
        ),
        migrations.AddField(
            model_name='batch',
            name='input_etag',
            field=models.CharField(blank=True, max_length=128),
        ),
        migrations.AddField(
            model_name='batch',
            name='input_uri',
            field=models.CharField(blank=True, max_length=1000),
        ),
        migrations.AddField(
            model_name='batch',
            name='output_uri',
            field=models.CharField(blank=True, max_length=1000),
        ),
        migrations.AddField(
            model_name='batch',
            name='raised_at',
            field=models.DateTimeField(null=True),
        ),
        migrations.AddField(
            model_name='batch',
            name='work_fence',
            field=models.PositiveIntegerField(default=0),
        ),
        migrations.AlterField(
            model_name='batch',
            name='input_file_id',
            field=models.CharField(blank=True, max_length=40),
        ),
        migrations.AddConstraint(
            model_name='batch',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('input_uri', ''), models.Q(('input_file_id', ''), _negated=True)), models.Q(models.Q(('input_uri', ''), _negated=True), ('input_file_id', '')), _connector='OR'), name='batch_has_one_input'),
        ),
        migrations.AddConstraint(
            model_name='bucketgrant',
            constraint=models.UniqueConstraint(fields=('tenant', 'bucket', 'prefix'), name='bucket_grant_once'),
        ),
        migrations.AddConstraint(
            model_name='bucketgrant',
            constraint=models.CheckConstraint(condition=models.Q(('may_read', True), ('may_write', True), _connector='OR'), name='bucket_grant_of_something'),
        ),
        migrations.AddConstraint(
            model_name='tenantwebhook',
            constraint=models.UniqueConstraint(fields=('tenant', 'url'), name='tenant_webhook_once'),
        ),
    ]
