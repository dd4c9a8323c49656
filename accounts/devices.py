"""Remembers, in a signed cookie, that a browser has logged in as a user before. It proves nothing but that: such a
browser is counted by itself and has hash slots of its own, so that strangers who guess, or who crowd the login, keep
out nobody who was here before (OWASP: device cookies)."""

import secrets
from datetime import timedelta

from django.conf import settings
from django.core import signing
from django.http import HttpRequest, HttpResponse

REMEMBERED = timedelta(days=180)
_SALT = "accounts.device"


def device_of(request: HttpRequest, username: str) -> str:
    """The number of a browser that has logged in as this user; "" for all others."""
    try:
        name, number = signing.loads(
            request.COOKIES.get(settings.DEVICE_COOKIE_NAME, ""), salt=_SALT, max_age=REMEMBERED
        )
    except (signing.BadSignature, ValueError, TypeError):
        return ""
    return str(number) if name == username.casefold() else ""


def device_remember(response: HttpResponse, username: str) -> None:
    response.set_cookie(
        settings.DEVICE_COOKIE_NAME,
        signing.dumps([username.casefold(), secrets.token_hex(16)], salt=_SALT),
        max_age=REMEMBERED,
        httponly=True,
        samesite="Lax",
        secure=settings.SESSION_COOKIE_SECURE,
    )
