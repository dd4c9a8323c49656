"""Browsers of one admin, for tests of how people log in."""

import pytest
from django.test import Client


@pytest.fixture
def ada(client: Client) -> Client:
    """A browser in which ada, an admin, has just logged in."""
    from tests.accounts.factors import admin_logged_in  # models can be imported once Django is set up

    return admin_logged_in(client, "ada")


@pytest.fixture
def browser() -> Client:
    return Client()
