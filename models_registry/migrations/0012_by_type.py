from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("models_registry", "0011_configuration_search")]

    operations = [
        migrations.AddField(
            model_name="modelversion",
            name="by_type",
            field=models.JSONField(blank=True, default=dict),
        ),
    ]
