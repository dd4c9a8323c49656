"""User names: none can be confused with another one, in any column."""

import pytest

from accounts.models import NAME_LONGEST, NAME_RESERVED, ApiToken, Approval, Grant, name_refusal
from accounts.services.user import service_account_create, user_create
from kernel import clock
from kernel.models import Event
from kernel.refusals import InvalidInput


@pytest.mark.parametrize("name", ["ada", "ada.lovelace@example.com", "ci-bot_2", "switchyard-ci", 64 * "a"])
def test_an_ordinary_name_is_free(name: str) -> None:
    assert name_refusal(name) == ""


@pytest.mark.parametrize(
    "name",
    [
        "",
        "-ada",
        "a b",
        "\u0430da",
        "ad" + chr(0x430),
        "ada\u200b",
        "ada\n",
        65 * "a",
        *sorted(NAME_RESERVED),
        "Switchyard",
        "ROOT",
    ],
)
def test_a_name_that_looks_like_another_or_is_cut_is_refused(name: str) -> None:
    assert name_refusal(name)


@pytest.mark.parametrize(
    ("model", "column"),
    [
        (Event, "actor"),
        (Approval, "requested_by"),
        (Approval, "decided_by"),
        (ApiToken, "created_by"),
        (Grant, "created_by"),
    ],
)
def test_every_column_that_names_an_actor_holds_the_longest_name(model: type, column: str) -> None:
    assert model._meta.get_field(column).max_length >= NAME_LONGEST  # type: ignore[attr-defined]  # of a model


@pytest.mark.django_db
@pytest.mark.parametrize("name", ["switchyard", 65 * "a"])
def test_neither_a_person_nor_a_program_gets_such_a_name(name: str) -> None:
    with pytest.raises(InvalidInput):
        user_create(username=name, actor="ada", now=clock.now())
    with pytest.raises(InvalidInput):
        service_account_create(name=name, actor="ada", now=clock.now())
