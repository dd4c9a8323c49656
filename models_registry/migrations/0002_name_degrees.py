"""Degrees take the names that engines use: tensor -> tp, pipeline -> pp."""

from django.db import migrations

NAMES = {"tensor": "tp", "pipeline": "pp"}


def rename(apps, names):
    versions = apps.get_model("models_registry", "ModelVersion").objects
    for version in versions.all():
        version.parallelism = {
            kind: {names.get(name, name): degree for name, degree in degrees.items()}
            for kind, degrees in version.parallelism.items()
        }
        version.save(update_fields=["parallelism"])


def forwards(apps, schema_editor):
    rename(apps, NAMES)


def backwards(apps, schema_editor):
    rename(apps, {new: old for old, new in NAMES.items()})


class Migration(migrations.Migration):

    dependencies = [
        ('models_registry', '0001_initial'),
    ]

    operations = [
        migrations.RunPython(forwards, backwards),
    ]
