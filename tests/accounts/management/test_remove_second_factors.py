"""`manage.py remove_second_factors`: the owner of the host helps who lost them."""

from io import StringIO

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command

from accounts.models import SecondFactor
from audit.models import AuditRecord
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


def test_a_user_logs_in_with_the_password_alone_again() -> None:
    user = User.objects.create_user("ada")
    SecondFactor.objects.create(user=user, kind="app", name="phone", created_at=NOW)
    output = StringIO()
    call_command("remove_second_factors", "ada", stdout=output)
    assert "ada now logs in with the password alone" in output.getvalue()
    assert not SecondFactor.objects.exists()
    assert AuditRecord.objects.get().action == "command.remove_second_factors"


@pytest.mark.parametrize(("name", "message"), [("ada", "no second factor"), ("eve", "no user 'eve'")])
def test_what_it_cannot_do_it_says(name: str, message: str) -> None:
    User.objects.create_user("ada")
    with pytest.raises(CommandError, match=message):
        call_command("remove_second_factors", name)
