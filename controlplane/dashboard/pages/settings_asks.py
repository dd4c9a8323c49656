"""How the forms of the settings are asked: checked as the API checks, carried out by one service, and back to the page.
What was refused is said on a page of its own. Nothing is decided here."""

from collections.abc import Callable
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from rest_framework import serializers

from kernel.refusals import InvalidInput, Refusal

LONGEST_TEXT = 500
Act = Callable[[], object]


def ask(request: HttpRequest, back: str, act: Act) -> HttpResponse:
    """Do it and show the page `back` again; what `act` answers is shown instead if it is a page."""
    try:
        done = act()
    except Refusal as why:
        return refused(request, back, str(why), 409)
    return done if isinstance(done, HttpResponse) else redirect(back)


def refused(request: HttpRequest, back: str, why: str, status: int) -> HttpResponse:
    """Nothing was done, and why."""
    context = {"refused": why.rstrip("."), "back": back}
    return render(request, "dashboard/settings/refused.html", context, status=status)


def shown(request: HttpRequest, back: str, *, what: str, name: str, text: str, use: str) -> HttpResponse:
    """A secret, once."""
    context = {"what": what, "name": name, "text": text, "use": use, "back": back}
    return render(request, "dashboard/settings/shown.html", context)


def checked(body: type[serializers.Serializer[Any]], asked: dict[str, Any]) -> dict[str, Any]:
    """What was asked, as the API's serializer takes it; fields left empty are left out.

    Raises:
        InvalidInput: the first field that breaks a rule.
    """
    given = {name: value for name, value in asked.items() if value not in ("", None)}
    form = body(data=given)
    if form.is_valid():
        return dict(form.validated_data)
    field, said = next(iter(form.errors.items()))
    words = said[0] if isinstance(said, list) else said
    raise InvalidInput(field=str(field), rule="valid", message=f"{str(field).replace('_', ' ')}: {words}")


def word(request: HttpRequest, name: str) -> str:
    """A field of the form, storable and of a bounded length."""
    return str(request.POST.get(name, "")).replace("\x00", "\ufffd")[:LONGEST_TEXT].strip()


def words(request: HttpRequest, name: str) -> list[str]:
    """All values of a field that may have several."""
    return [text.replace("\x00", "\ufffd")[:LONGEST_TEXT] for text in request.POST.getlist(name)]


def actor(request: HttpRequest) -> str:
    """Who asks, as event rows name them."""
    return request.user.get_username()[:64]
