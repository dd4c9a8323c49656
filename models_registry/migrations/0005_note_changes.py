# Every change of what the API shows is noted for those who watch it (docs/adr/0028-rest-conventions.md).

from django.db import migrations

from kernel.change_triggers import RecordChanges

NAME = '{row}.name'


class Migration(migrations.Migration):

    dependencies = [
        ('kernel', '0002_rest_conventions'),
        ('models_registry', '0004_lifecycle'),
    ]

    operations = [
        RecordChanges(table='models_registry_model', kind='model', thing='name', key=NAME),
        RecordChanges(table='models_registry_modelversion', kind='model', thing='model_id', key='{row}.model_id'),
        RecordChanges(
            table='models_registry_modelversion',
            kind='model-version',
            thing='id',
            key="{row}.model_id || '@' || {row}.version",
        ),
        RecordChanges(table='models_registry_validation', kind='model-version', thing='version_id'),
    ]
