"""Deliveries as Standard Webhooks have them, and what their addresses were taken from."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('fleet', '0039_ranges_from_zero'),
    ]

    operations = [
        migrations.AddField(
            model_name='webhookdelivery',
            name='is_standard',
            field=models.BooleanField(default=False),
        ),
        migrations.AddField(
            model_name='webhookdelivery',
            name='origin',
            field=models.CharField(blank=True, max_length=64),
        ),
    ]
