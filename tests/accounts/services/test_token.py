"""Creating and revoking tokens leaves a trace, and never the secret."""

import pytest
from django.contrib.auth.models import User

from accounts.models import ApiToken
from accounts.services import token_create, token_revoke
from kernel.models import Event
from tests.fleet.rows import NOW

pytestmark = pytest.mark.django_db


def test_only_a_hash_of_the_secret_is_stored() -> None:
    row, text = token_create(user=User.objects.create(username="ada"), name="laptop", now=NOW)
    stored = " ".join(str(value) for value in ApiToken.objects.values_list().get(pk=row.pk))
    assert text.rpartition("_")[2] not in stored
    assert text.startswith(f"sw_{row.prefix}_")


def test_creating_and_revoking_are_events() -> None:
    row, text = token_create(user=User.objects.create(username="ada"), name="laptop", now=NOW)
    assert token_revoke(token=row, actor="grace", now=NOW)
    revoked, created = Event.objects.all()
    assert (created.kind, created.actor) == ("token.created", "ada")
    assert (revoked.kind, revoked.actor) == ("token.revoked", "grace")
    assert text not in created.message + revoked.message


def test_revoking_twice_changes_nothing() -> None:
    row, _ = token_create(user=User.objects.create(username="ada"), name="laptop", now=NOW)
    assert token_revoke(token=row, actor="ada", now=NOW)
    assert not token_revoke(token=row, actor="ada", now=NOW)
    assert Event.objects.filter(kind="token.revoked").count() == 1
