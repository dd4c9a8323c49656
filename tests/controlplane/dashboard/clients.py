"""A browser's requests, signed in or not, without a browser."""

import re

from django.contrib.auth.models import User
from django.test import Client

OPENED = re.compile(r'name="opened" value="([^"]*)"')


def signed_in() -> Client:
    client = Client()
    client.force_login(User.objects.get_or_create(username="operator", defaults={"is_superuser": True})[0])
    return client


def fragment(client: Client, url: str, name: str) -> str:
    """The response to htmx for one fragment of a page."""
    response = client.get(url, headers={"HX-Request": "true", "HX-Target": name})
    assert response.status_code == 200
    return response.text


def opened_in(text: str) -> str:
    """The time at which a form was opened, which it sends (`{% opened %}`)."""
    return str(OPENED.findall(text)[0])
