from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("traffic", "0012_request_queues")]

    operations = [
        migrations.AddField(
            model_name="applicationkey",
            name="allowed_origins",
            field=models.JSONField(blank=True, default=list),
        ),
    ]
