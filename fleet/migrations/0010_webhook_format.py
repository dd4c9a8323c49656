from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0009_node_log")]
    operations = [
        migrations.AddField(
            model_name="webhook",
            name="format",
            field=models.CharField(choices=[('json', 'Json'), ('slack', 'Slack')], default="json", max_length=8),
        ),
    ]
