"""What tests of second factors share: enrolling them as users do, in pages, and showing them."""

import re
from html import unescape
from typing import Any
from unittest.mock import patch

import pyotp
from django.test import Client

from accounts import one_time_codes
from accounts.models import SecondFactor
from kernel import clock
from kernel.access import Role
from tests.accounts.software_key import SoftwareKey
from tests.controlplane.access.callers import make_user

APP, KEY, CONFIRM = (f"/settings/second-factor/{page}/" for page in ("app", "key", "confirm"))
SECOND = "/login/second/"
PASSWORD = "correct horse battery"


def field(page: str, name: str) -> str:
    found = re.search(rf'name="{name}" value="([^"]*)"', page)
    assert found, page
    return unescape(found[1])


def options(page: str) -> str:
    found = re.search(r'data-options="([^"]*)"', page)
    assert found, page
    return unescape(found[1])


def code_of(secret: str, ahead: int = 0) -> str:
    """The app's code now, or some time steps ahead."""
    return pyotp.TOTP(secret).generate_otp(int(clock.now().timestamp()) // one_time_codes.STEP_S + ahead)


def wrong_code(secret: str) -> str:
    """Six digits that no step around now has."""
    near = {code_of(secret, ahead) for ahead in range(-3, 4)}
    return next(code for code in ("000000", "111111", "222222", "333333", "444444") if code not in near)


def app_added(client: Client) -> tuple[str, tuple[str, ...]]:
    """The secret of a new app, and recovery codes if they were shown. Its code of this moment is not used up."""
    page = client.get(APP).text
    secret = "".join(re.findall(r"<code>(\w+)</code>", page))
    with patch.object(clock, "now", return_value=clock.now()):
        form = {"secret": field(page, "secret"), "one_time_code": code_of(secret, -1), "name": "phone"}
        response = client.post(APP, form)
    assert response.status_code in {200, 302}, response.text
    shown = re.search(r'<pre id="recovery-codes">([^<]*)</pre>', response.text)
    return secret, tuple(shown[1].split()) if shown else ()


def key_added(client: Client, key: SoftwareKey) -> Any:
    page = client.get(KEY, headers={"host": "localhost"}).text
    form = {"credential": key.create(options(page)), "name": "blue key"}
    return client.post(KEY, form, headers={"host": "localhost"})


def password_shown(client: Client, username: str = "ada", wanted: str = "") -> Any:
    return client.post("/login/", {"username": username, "password": PASSWORD, "next": wanted})


def last_count() -> int:
    return SecondFactor.objects.get().last_count


def is_in(client: Client) -> bool:
    """Whether this browser is logged in."""
    return client.get("/settings/").status_code == 200


def admin_logged_in(client: Client, name: str) -> Client:
    """The client, as the browser of a new admin who has just shown their password."""
    user = make_user(name, Role.ADMIN)
    user.set_password(PASSWORD)
    user.save()
    assert password_shown(client).headers["Location"] == "/"
    return client
