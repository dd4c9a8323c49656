"""A browser's requests, signed in or not, without a browser."""

from django.contrib.auth.models import User
from django.test import Client


def signed_in() -> Client:
    client = Client()
    client.force_login(User.objects.get_or_create(username="operator", defaults={"is_superuser": True})[0])
    return client


def fragment(client: Client, url: str, name: str) -> str:
    """The response to htmx for one fragment of a page."""
    response = client.get(url, headers={"HX-Request": "true", "HX-Target": name})
    assert response.status_code == 200
    return response.text
