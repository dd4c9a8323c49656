from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('fleet', '0028_declared_pools'),
    ]

    operations = [
        migrations.AddField(
            model_name='capacitypool',
            name='price_per_hour',
            field=models.FloatField(null=True),
        ),
        migrations.AddField(
            model_name='capacitypool',
            name='price_at',
            field=models.DateTimeField(null=True),
        ),
        migrations.RemoveField(
            model_name='machine',
            name='launch_index',
        ),
    ]
