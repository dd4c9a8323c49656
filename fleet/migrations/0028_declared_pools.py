from django.db import migrations, models

from kernel.change_triggers import RecordChanges


class Migration(migrations.Migration):

    dependencies = [
        ('fleet', '0027_cloud_leftovers'),
        ('kernel', '0002_rest_conventions'),
    ]

    operations = [
        migrations.AddField(
            model_name='capacitypool',
            name='declared_by',
            field=models.CharField(blank=True, max_length=64),
        ),
        RecordChanges(table='fleet_capacitypool', kind='capacity-pool', thing='id', key='{row}.id::text'),
    ]
