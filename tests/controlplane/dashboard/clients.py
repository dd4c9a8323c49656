"""A browser's requests, signed in or not, without a browser."""

from django.contrib.auth.models import User
from django.test import Client

from tests.fleet.rows import found_or_made


def signed_in() -> Client:
    client = Client()
    client.force_login(found_or_made(User, lambda: {"is_superuser": True}, username="operator"))
    return client


def fragment(client: Client, url: str, name: str) -> str:
    """What htmx gets when it asks a page for one of its fragments."""
    response = client.get(url, headers={"HX-Request": "true", "HX-Target": name})
    assert response.status_code == 200
    return response.text
