"""`manage.py ensure_operator`: safe to repeat, and never more open than it must be."""

import stat
from io import StringIO
from pathlib import Path

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command

from accounts.models import ApiToken
from accounts.selectors import token_by_text
from accounts.services.token import token_revoke
from kernel import clock

pytestmark = pytest.mark.django_db

VARIABLE = "SWITCHYARD_OPERATOR_PASSWORD"


@pytest.fixture
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, "a long password")
    return tmp_path / "home" / "operator-token"


def ensure(token_file: Path) -> str:
    out = StringIO()
    call_command("ensure_operator", password_env=VARIABLE, token_file=token_file, stdout=out)
    return out.getvalue()


def test_the_operator_can_log_in_and_use_the_token(token_file: Path) -> None:
    ensure(token_file)
    operator = User.objects.get(username="operator")
    assert operator.is_superuser
    assert operator.check_password("a long password")
    token = token_by_text(token_file.read_text().strip())
    assert token is not None
    assert token.user == operator


def test_nobody_else_can_read_the_file(token_file: Path) -> None:
    ensure(token_file)
    assert stat.S_IMODE(token_file.stat().st_mode) == 0o600


def test_repeating_it_changes_nothing(token_file: Path) -> None:
    ensure(token_file)
    before = (token_file.read_text(), User.objects.get().password)
    assert "still valid" in ensure(token_file)
    assert (token_file.read_text(), User.objects.get().password) == before
    assert ApiToken.objects.count() == 1


@pytest.mark.parametrize("content", ["", "sw_00000000000000_0000\n", "\x00\xff"])
def test_a_file_that_opens_nothing_is_replaced_and_the_lost_token_revoked(token_file: Path, content: str) -> None:
    ensure(token_file)
    lost = token_file.read_text().strip()
    token_file.write_text(content)
    assert "written" in ensure(token_file)
    revoked = token_by_text(lost)
    assert revoked is not None
    assert revoked.refusal(clock.now()) is not None
    assert token_by_text(token_file.read_text().strip()) not in {None, revoked}


def test_a_revoked_token_is_replaced(token_file: Path) -> None:
    ensure(token_file)
    first = token_file.read_text()
    token_revoke(token=ApiToken.objects.get(), actor="operator", now=clock.now())
    ensure(token_file)
    assert token_file.read_text() != first


def test_a_new_password_replaces_the_old_one(token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure(token_file)
    monkeypatch.setenv(VARIABLE, "another password")
    ensure(token_file)
    assert User.objects.get().check_password("another password")


def test_a_missing_password_is_named(token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(CommandError, match=f"{VARIABLE} is not set"):
        ensure(token_file)


def test_a_place_that_cannot_be_written_is_named_and_leaves_no_token(token_file: Path) -> None:
    token_file.parent.mkdir()
    token_file.mkdir()
    with pytest.raises(CommandError, match="cannot write the API token to"):
        ensure(token_file)
    assert not ApiToken.objects.exists()
