"""A credential with which its agent's certificate was shown counts only together with it."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('fleet', '0049_agent_listener'),
    ]

    operations = [
        migrations.AddField(
            model_name='agentcredential',
            name='bound_at',
            field=models.DateTimeField(null=True),
        ),
    ]
