"""Benchmarks say how many cells had which role, and searches that vary it which the deployment had before."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('models_registry', '0013_calibrations_are_final'),
    ]

    operations = [
        migrations.AddField(
            model_name='benchmark',
            name='split',
            field=models.CharField(blank=True, max_length=40),
        ),
        migrations.AddField(
            model_name='configurationsearch',
            name='cells_before',
            field=models.JSONField(null=True),
        ),
    ]
