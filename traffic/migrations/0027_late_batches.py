from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('traffic', '0026_batch_timeline'),
    ]

    operations = [
        migrations.AddField(model_name='batch', name='cells_asked_at', field=models.DateTimeField(null=True)),
        migrations.AddField(model_name='batch', name='paced_at', field=models.DateTimeField(null=True)),
        migrations.AddField(model_name='batch', name='paced_done', field=models.PositiveIntegerField(default=0)),
    ]
