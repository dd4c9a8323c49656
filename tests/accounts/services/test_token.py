"""Creating and revoking tokens leaves a trace, and never the secret."""

from typing import Any

import pytest
from django.contrib.auth.models import User

from accounts.models import ApiToken
from accounts.services.token import token_create, token_create_within, token_revoke
from accounts.services.user import password_change, user_change
from kernel.access import Scope
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


def test_what_a_token_made_is_revoked_with_it() -> None:
    user = User.objects.create(username="ada")
    stolen, _ = token_create(user=user, name="laptop", now=NOW)
    own, _ = token_create(user=user, name="ci", now=NOW)

    def made_with(token: ApiToken) -> ApiToken:
        made, _ = token_create_within(
            user=user, name="made", days=9, scope=Scope.READ, shown=token, actor="ada", now=NOW
        )
        return made

    child = made_with(stolen)
    grandchild = made_with(child)
    assert token_revoke(token=stolen, actor="ada", now=NOW)
    active = ApiToken.objects.filter(revoked_at=None)
    assert [token.pk for token in active] == [own.pk]
    assert ApiToken.objects.get(pk=grandchild.pk).refusal(NOW) is not None


@pytest.mark.parametrize("change", [{"active": False}, {"password": "another horse battery"}])
def test_a_deactivation_and_a_new_password_revoke_all_tokens(change: dict[str, Any]) -> None:
    ada, grace = User.objects.create(username="ada"), User.objects.create_superuser("grace")
    for user in (ada, grace):
        token_create(user=user, name="laptop", now=NOW)
    user_change(username="ada", actor="grace", now=NOW, **change)
    assert [token.user for token in ApiToken.objects.filter(revoked_at=None)] == [grace]


def test_an_own_new_password_revokes_all_tokens() -> None:
    ada = User.objects.create(username="ada")
    token_create(user=ada, name="laptop", now=NOW)
    password_change(user=ada, new="another horse battery", now=NOW)
    assert not ApiToken.objects.filter(revoked_at=None).exists()
