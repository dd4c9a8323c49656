from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("traffic", "0027_late_batches")]

    operations = [
        migrations.AddField(
            model_name="batch",
            name="validations",
            field=models.PositiveSmallIntegerField(default=0),
        )
    ]
