"""One open row of each kind for a machine: of several the one that ends first stays, and says who said it."""

from django.db import migrations, models
from django.db.models import F


def _merge(apps, schema_editor):
    notices = apps.get_model("fleet", "CloudNotice")
    kept = {}
    for row in notices.objects.filter(settled_at=None).order_by(F("ends_at").asc(nulls_last=True), "pk"):
        first = kept.setdefault((row.machine_id, row.kind), row)
        end = row.ends_at.isoformat() if row.ends_at else None
        first.evidence.setdefault(row.source, {"key": row.event_key, "at": row.at.isoformat(), "ends_at": end})
        if first is not row:
            notices.objects.filter(pk=row.pk).update(settled_at=row.at)
    for row in kept.values():
        row.save(update_fields=["evidence"])


class Migration(migrations.Migration):
    dependencies = [
        ("fleet", "0029_prices"),
    ]

    operations = [
        migrations.RunPython(_merge, migrations.RunPython.noop),
        migrations.RunSQL("SET CONSTRAINTS ALL IMMEDIATE", migrations.RunSQL.noop),
        migrations.RemoveField(
            model_name="cloudnotice",
            name="event_key",
        ),
        migrations.AddConstraint(
            model_name="cloudnotice",
            constraint=models.UniqueConstraint(
                condition=models.Q(("settled_at", None)), fields=("machine", "kind"), name="notice_once"
            ),
        ),
    ]
