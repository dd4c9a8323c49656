"""Errors look like the rest and say what to do next."""

import pytest
from django.template.loader import render_to_string
from django.test import Client
from django.urls import reverse


@pytest.mark.parametrize("page", ["403.html", "404.html", "500.html"])
def test_an_error_page_needs_nothing_that_may_be_broken(page: str) -> None:
    assert reverse("overview") in render_to_string(page)


@pytest.mark.django_db
def test_a_form_that_is_too_old_says_reload() -> None:
    response = Client(enforce_csrf_checks=True).post(reverse("login"), {"username": "operator", "password": "x"})
    assert response.status_code == 403
    assert "reload" in response.text
