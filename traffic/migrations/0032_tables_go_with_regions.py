import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("traffic", "0031_unserved")]

    operations = [
        migrations.AlterField(
            model_name="routingtable",
            name="region",
            field=models.ForeignKey(
                on_delete=django.db.models.deletion.CASCADE, related_name="routing_tables", to="fleet.region"
            ),
        )
    ]
