"""Static files as pages name them: by a digest, compressed, and never asked for twice."""

import gzip
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from django.contrib.staticfiles import finders
from django.contrib.staticfiles.storage import staticfiles_storage
from django.test import Client

from controlplane.static_files import VENDORED, hashed_name
from tests.controlplane.dashboard.clients import signed_in

pytestmark = pytest.mark.django_db
NAME = "dashboard/console.css"
FOREVER, A_MINUTE = "max-age=315360000, public, immutable", "max-age=60, public"


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    content: bytes


def got(url: str, **headers: str) -> Answer:
    answer: Any = Client().get(url, headers=headers)
    content = b"".join(answer.streaming_content) if answer.streaming else answer.content
    return Answer(answer.status_code, answer.headers, content)


def content_of(name: str) -> bytes:
    with open(finders.find(name) or "", "rb") as file:
        return file.read()


def test_every_file_of_a_page_is_cached_for_ever_and_compressed_where_that_helps() -> None:
    client = signed_in()
    page = client.get("/").text
    urls = re.findall(r'(?:src|href)="(/static/[^"]+)"', page)
    assert len(urls) > 5
    sent = whole = 0
    for url in urls:
        answer, plain = got(url, **{"Accept-Encoding": "gzip, br"}), got(url)
        assert answer.status == 200, url
        assert answer.headers["Cache-Control"] == FOREVER, url
        is_compressed = answer.headers.get("Content-Encoding") == "gzip"
        assert (gzip.decompress(answer.content) if is_compressed else answer.content) == plain.content
        sent, whole = sent + len(answer.content), whole + len(plain.content)
    assert sent < whole / 2


def test_a_name_follows_its_content() -> None:
    assert re.fullmatch(r"dashboard/console\.[0-9a-f]{12}\.css", hashed_name(NAME))
    assert staticfiles_storage.url(NAME) == f"/static/{hashed_name(NAME)}"
    assert hashed_name("dashboard/nothing.css") == "dashboard/nothing.css"


def test_the_name_of_another_release_gets_the_file_of_today_for_a_minute() -> None:
    answer = got("/static/dashboard/console.0123456789ab.css")
    assert (answer.content, answer.headers["Cache-Control"]) == (content_of(NAME), A_MINUTE)
    assert got("/static/dashboard/nothing.0123456789ab.css").status == 404


def test_a_name_without_a_digest_is_cached_for_a_minute_unless_it_has_a_version() -> None:
    assert got(f"/static/{NAME}").headers["Cache-Control"] == A_MINUTE
    fonts = re.findall(r"\.\./(vendor/[^\")]+)", content_of(NAME).decode())
    assert fonts
    for font in fonts:
        assert font.startswith(VENDORED)
        assert got(f"/static/{font}").headers["Cache-Control"] == FOREVER


def test_what_a_browser_has_is_not_sent_again() -> None:
    url = staticfiles_storage.url(NAME)
    known = {"Last-Modified": got(url).headers["Last-Modified"]}
    assert got(url, **{"If-Modified-Since": known["Last-Modified"]}).status == 304
