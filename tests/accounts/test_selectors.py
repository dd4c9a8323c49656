"""A user's access, from groups and grants."""

import pytest
from django.contrib.auth.models import AnonymousUser, Group, User
from django.db import IntegrityError, transaction

from accounts.models import Grant, GroupRole
from accounts.selectors import access_of_user
from kernel import clock
from kernel.access import Access, Role, Scope

pytestmark = pytest.mark.django_db


def group(name: str, role: Role, *members: User) -> Group:
    row = Group.objects.create(name=name)
    GroupRole.objects.create(group=row, role=role.value)
    row.user_set.set(members)
    return row


def grant(deployment: str, role: Role, **to: User | Group) -> Grant:
    return Grant.objects.create(deployment=deployment, role=role.value, created_by="ada", created_at=clock.now(), **to)


def access(user: User) -> Access:
    return access_of_user(user, Scope.ADMIN)


def test_strangers_and_deactivated_people_have_no_role() -> None:
    assert access_of_user(AnonymousUser(), Scope.ADMIN).role is None
    assert access(User.objects.create(username="eve", is_active=False, is_superuser=True)).role is None


def test_whoever_is_in_no_group_may_look() -> None:
    assert access(User.objects.create(username="eve")).role is Role.VIEWER


def test_a_superuser_is_an_admin() -> None:
    assert access(User.objects.create(username="root", is_superuser=True)).role is Role.ADMIN


def test_the_highest_role_of_all_groups_counts() -> None:
    ada = User.objects.create(username="ada")
    group("oncall", Role.OPERATOR, ada)
    assert access(ada).role is Role.OPERATOR
    group("owners", Role.ADMIN, ada)
    assert access(ada).role is Role.ADMIN


def test_grants_come_from_the_user_and_from_groups_and_the_higher_counts() -> None:
    ada = User.objects.create(username="ada")
    team = group("team", Role.VIEWER, ada)
    grant("chat", Role.OPERATOR, group=team)
    grant("chat", Role.VIEWER, user=ada)
    grant("code", Role.OPERATOR, user=User.objects.create(username="bob"))
    assert access(ada).grants == {"chat": Role.OPERATOR}


def test_a_grant_is_to_a_user_or_to_a_group() -> None:
    with pytest.raises(IntegrityError), transaction.atomic():
        grant("chat", Role.OPERATOR)
