"""What keeps the first cell of a deployment from machines, so that nobody waits for it."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('traffic', '0024_demand'),
    ]

    operations = [
        migrations.AddField(
            model_name='poolhold',
            name='withheld',
            field=models.CharField(
                blank=True,
                choices=[('', ''), ('quota', 'Quota'), ('machines', 'Machines')],
                default='',
                max_length=16,
            ),
        ),
    ]
