"""What is known of files. Whoever is not the tenant of one finds none (I15)."""

from datetime import datetime

from django.db.models import Count, QuerySet, Sum

from traffic.models import StoredFile
from traffic.planning.stored_file import FILE_ID, FileFacts


def stored_file_of(tenant: str, file_id: str, now: datetime) -> StoredFile | None:
    if not FILE_ID.fullmatch(file_id):
        return None
    return StoredFile.objects.filter(id=file_id, tenant=tenant, expires_at__gt=now).first()


def stored_files(tenant: str, now: datetime, purpose: str | None) -> "QuerySet[StoredFile]":
    rows = StoredFile.objects.filter(tenant=tenant, expires_at__gt=now)
    return rows.filter(purpose=purpose) if purpose else rows


def stored_of_tenant(tenant: str) -> tuple[int, int]:
    """How many files a tenant has, and how many bytes: of an index alone."""
    totals = StoredFile.objects.filter(tenant=tenant).order_by().aggregate(n=Count("pk"), size=Sum("bytes"))
    return totals["n"], totals["size"] or 0


def file_facts(file: StoredFile) -> FileFacts:
    return FileFacts(file.id, file.bytes, file.filename, file.purpose, file.created_at, file.expires_at)
