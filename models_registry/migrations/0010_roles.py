from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("models_registry", "0009_speculation_calibration")]

    operations = [
        migrations.AddField(
            model_name="modelversion",
            name="roles",
            field=models.JSONField(blank=True, default=dict),
        ),
    ]
