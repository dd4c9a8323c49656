# Every row of reports is written every 2 s. With room in its page a new version needs no entry in any index, and the old
# one's place is free again without a vacuum.

from django.db import migrations


class Migration(migrations.Migration):

    dependencies = [
        ('fleet', '0013_provider_calls'),
    ]

    operations = [
        migrations.RunSQL(
            'ALTER TABLE fleet_nodereport SET (fillfactor = 50)',
            'ALTER TABLE fleet_nodereport RESET (fillfactor)',
        ),
    ]
