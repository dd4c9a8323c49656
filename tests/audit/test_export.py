"""Exported records are complete and verifiable, and the export continues where it stopped."""

import json
import socket
from datetime import datetime
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import connection

from audit.models import AuditChain, AuditExport, AuditRecord, Proof
from audit.record_format import START, record_digest
from audit.services import Act, Actor, audit_export_on, audit_record
from audit.sinks import BadTarget, sink_of
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


def write(count: int) -> None:
    for _ in range(count):
        audit_record(actor=Actor("ada", Proof.TOKEN), act=Act(action="a.b", reason="naïve"), now=NOW)


def test_a_file_gets_lines_from_which_the_chain_can_be_checked(tmp_path: Path) -> None:
    write(3)
    output = StringIO()
    call_command("audit_export", to=f"file://{tmp_path}/audit.jsonl", stdout=output)
    assert output.getvalue() == "exported 3 records\n"
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [line["number"] for line in lines] == [1, 2, 3]
    previous = START
    for line in lines:
        assert line["previous"] == previous
        previous = record_digest(SimpleNamespace(**{**line, "at": datetime.fromisoformat(line["at"])}))
        assert line["digest"] == previous


def test_continuous_export_goes_on_from_where_it_stopped(tmp_path: Path) -> None:
    target = f"file://{tmp_path}/audit.jsonl"
    write(2)
    assert audit_export_on(target=target, now=NOW) == 2
    write(1)
    assert audit_export_on(target=target, now=NOW) == 1
    assert audit_export_on(target=target, now=NOW) == 0
    assert len((tmp_path / "audit.jsonl").read_text().splitlines()) == 3
    assert AuditExport.objects.get().number == 3


def test_records_leave_the_database_unless_somebody_decides_otherwise() -> None:
    assert (settings.SWITCHYARD_HOME / "audit" / "records.jsonl").as_uri() == settings.AUDIT_EXPORT


def test_a_chain_that_was_rewritten_whole_does_not_match_what_was_exported(tmp_path: Path, settings: Any) -> None:
    settings.AUDIT_EXPORT = f"file://{tmp_path}/audit.jsonl"
    write(3)
    audit_export_on(target=settings.AUDIT_EXPORT, now=NOW)
    write(1)
    output = StringIO()
    call_command("audit_verify", stdout=output)
    assert "record 3 matches the stored head" in output.getvalue()
    rewrite_chain()
    with pytest.raises(CommandError, match="record 3 is broken"):
        call_command("audit_verify")


def rewrite_chain() -> None:
    """As the owner of the database can: other records, and digests that fit."""
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE audit_auditrecord DISABLE TRIGGER USER")
        AuditRecord.objects.all().delete()
        AuditChain.objects.all().delete()
        cursor.execute("ALTER TABLE audit_auditrecord ENABLE TRIGGER USER")
    for _ in range(4):
        audit_record(actor=Actor("eve", Proof.TOKEN), act=Act(action="a.b", reason="nothing"), now=NOW)


def test_a_place_that_takes_nothing_is_asked_again_later(tmp_path: Path) -> None:
    write(1)
    (tmp_path / "file").touch()
    assert audit_export_on(target=f"file://{tmp_path}/file/audit.jsonl", now=NOW) == 0
    assert AuditExport.objects.get().number == 0


def test_without_a_place_nothing_is_exported() -> None:
    write(1)
    assert audit_export_on(target="", now=NOW) == 0


def test_syslog_gets_one_message_a_record() -> None:
    write(2)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        receiver.settimeout(60)
        call_command("audit_export", to=f"syslog://127.0.0.1:{receiver.getsockname()[1]}", stdout=StringIO())
        messages = [receiver.recv(65536).decode() for _ in range(2)]
    assert all(message.startswith("<110>1 - ") for message in messages)
    assert json.loads(messages[1].partition(" audit - ")[2])["number"] == 2


def test_a_bucket_gets_an_object_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[dict[str, Any]] = []
    monkeypatch.setattr(boto3, "client", lambda *_, **__: SimpleNamespace(put_object=lambda **each: put.append(each)))
    write(2)
    call_command("audit_export", to="s3://vault/audit", after=1, stdout=StringIO())
    assert [(each["Bucket"], each["Key"]) for each in put] == [("vault", "audit/audit-000000000002-000000000002.jsonl")]


@pytest.mark.parametrize("target", ["audit.jsonl", "s3://", "http://x/y", "file://host/x", "syslog://:x"])
def test_what_is_no_place_is_refused_with_what_would_be(target: str) -> None:
    with pytest.raises(BadTarget):
        sink_of(target)
    with pytest.raises(CommandError):
        call_command("audit_export", to=target, stdout=StringIO())
