from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0002_rollouts")]

    operations = [
        migrations.AddField(
            model_name="node",
            name="terminated_at",
            field=models.DateTimeField(null=True),
        ),
    ]
