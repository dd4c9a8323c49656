
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('fleet', '0024_cloud'),
    ]

    operations = [
        migrations.AlterField(
            model_name='faultrule',
            name='rule',
            field=models.CharField(choices=[('hard_signature', 'Hard signature'), ('silence', 'Silence'), ('slow', 'Slow'), ('repeated_repairs', 'Repeated repairs'), ('notice', 'Notice'), ('operator', 'Operator')], max_length=32, primary_key=True, serialize=False),
        ),
        migrations.AlterField(
            model_name='replacement',
            name='rule',
            field=models.CharField(choices=[('hard_signature', 'Hard signature'), ('silence', 'Silence'), ('slow', 'Slow'), ('repeated_repairs', 'Repeated repairs'), ('notice', 'Notice'), ('operator', 'Operator')], max_length=32),
        ),
    ]
