"""Commands that change the control plane leave a record; a new one cannot forget to."""

import getpass
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import call_command, get_commands, load_command_class
from django.db import OperationalError

from audit import commands
from audit.commands import AuditedCommand
from tests.audit.records import changes, only_record, recorded

OURS = ("controlplane", "fleet", "models_registry", "traffic")
CHANGE_NOTHING = {
    "agent_archive", "artifact_push", "audit_export", "audit_verify", "fleet_status", "jobs",
    "medusa_tree", "seed_scale",
}  # fmt: skip
"""Readers; what packs the agent into the cache, or uploads files with the credentials of who runs it; sender and batch,
whose requests are applications'; and what fills a database for measurements."""


def test_every_command_of_ours_is_audited_or_changes_nothing() -> None:
    ours = {name: app for name, app in get_commands().items() if str(app).partition(".")[0] in OURS}
    unaudited = {
        name for name, app in ours.items() if not isinstance(load_command_class(str(app), name), AuditedCommand)
    }
    assert unaudited <= CHANGE_NOTHING


@pytest.mark.django_db
def test_a_command_is_recorded_with_the_account_that_ran_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPERATORS_PASSWORD", "correct-horse")
    token_file = tmp_path / "operator-token"
    for _ in range(2):  # the second one changes nothing
        call_command("ensure_operator", password_env="OPERATORS_PASSWORD", token_file=token_file, stdout=StringIO())
    record = only_record()
    assert (record.action, record.actor, record.proof) == ("command.ensure_operator", getpass.getuser(), "command")
    assert token_file.read_text().strip() not in record.changes
    assert "correct-horse" not in record.changes
    assert changes(record)["rows"]


@pytest.mark.django_db
def test_a_fleet_stops_without_a_database(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def away(**_: object) -> None:
        raise OperationalError("the database is away")

    monkeypatch.setattr(commands, "audit_record", away)
    output = StringIO()
    call_command("fleet_stop", stdout=output)
    assert "stopped 0 processes" in output.getvalue()
    assert "could not be recorded" in caplog.text
    assert recorded() == []
