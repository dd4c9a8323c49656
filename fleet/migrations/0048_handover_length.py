"""The planner of roles says from which length on prompts are handed over."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('fleet', '0047_instance_types_stated'),
    ]

    operations = [
        migrations.AddField(
            model_name='rolestate',
            name='from_tokens',
            field=models.PositiveIntegerField(null=True),
        ),
    ]
