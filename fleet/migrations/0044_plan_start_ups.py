from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('fleet', '0043_quotas_of_regions'),
    ]

    operations = [
        migrations.AddField(
            model_name='dayplanplace',
            name='start_up_s',
            field=models.FloatField(default=0.0),
        ),
    ]
