import json
from typing import Any

from audit.models import AuditRecord


def recorded() -> list[AuditRecord]:
    return list(AuditRecord.objects.order_by("number"))


def only_record() -> AuditRecord:
    (record,) = recorded()
    return record


def changes(record: AuditRecord) -> dict[str, Any]:
    """What a record says of its change."""
    return dict(json.loads(record.changes))
