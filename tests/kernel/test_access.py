"""Roles, grants and scopes: each may what it says and nothing above."""

from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory

from kernel.access import Access, Role, Scope, needs

VIEWER, OPERATOR, ADMIN = Role


def request_with(access: Access | None) -> HttpRequest:
    request = RequestFactory().get("/somewhere/?x=1")
    request.user = AnonymousUser() if access is None else User(username="ada")
    request.__dict__["_access"] = access or Access()
    return request


@pytest.mark.parametrize(("has", "may"), [(VIEWER, [1, 0, 0]), (OPERATOR, [1, 1, 0]), (ADMIN, [1, 1, 1])])
def test_a_role_covers_those_before_it(has: Role, may: list[int]) -> None:
    access = Access(role=has)
    assert [access.may(role) for role in Role] == [bool(each) for each in may]
    assert [access.view, access.operate, access.administer] == [bool(each) for each in may]


def test_nobody_may_nothing_whatever_was_granted() -> None:
    assert not Access(grants={"chat": ADMIN}).may(VIEWER, "chat")


def test_a_grant_counts_for_its_deployment_only() -> None:
    access = Access(role=VIEWER, grants={"chat": OPERATOR})
    assert access.may(OPERATOR, "chat")
    assert not access.may(OPERATOR, "code")
    assert not access.may(OPERATOR)
    assert not access.may(ADMIN, "chat")


def test_a_grant_takes_nothing_away() -> None:
    assert Access(role=ADMIN, grants={"chat": OPERATOR}).may(ADMIN, "chat")


@pytest.mark.parametrize(("scope", "capped"), [(Scope.READ, VIEWER), (Scope.WRITE, OPERATOR), (Scope.ADMIN, ADMIN)])
def test_a_scope_caps_role_and_grants(scope: Scope, capped: Role) -> None:
    assert Access(role=ADMIN, scope=scope).role_on() is capped
    assert Access(role=VIEWER, grants={"chat": ADMIN}, scope=scope).role_on("chat") is capped
    assert Access(role=VIEWER, scope=scope).role_on() is VIEWER


def page(role: Role, **guard: Any) -> Any:
    @needs(role, **guard)
    def view(request: HttpRequest, **kwargs: Any) -> HttpResponse:
        return HttpResponse("seen")

    return view


def test_a_page_sends_strangers_to_the_login_and_back() -> None:
    response = page(VIEWER)(request_with(None))
    assert response.headers["Location"] == "/login/?next=/somewhere/%3Fx%3D1"


def test_a_page_opens_for_its_role_and_names_it_to_others() -> None:
    assert page(OPERATOR)(request_with(Access(role=OPERATOR))).content == b"seen"
    with pytest.raises(PermissionDenied, match="Needs the operator role; you have viewer"):
        page(OPERATOR)(request_with(Access(role=VIEWER)))


def test_a_page_about_a_deployment_heeds_grants() -> None:
    view = page(OPERATOR, deployment=lambda request, name: name)
    granted = Access(role=VIEWER, grants={"chat": OPERATOR})
    assert view(request_with(granted), name="chat").content == b"seen"
    with pytest.raises(PermissionDenied):
        view(request_with(granted), name="code")
