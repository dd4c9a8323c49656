"""Every route takes odd values in every place, and answers 2xx to 4xx in its own dialect: the REST API problem
documents, routes of applications OpenAI's errors, pages HTML.

By default each place of the API and of a page gets one of the values, in turn. With `SWITCHYARD_FUZZ` set, as
`make test-all` does, it gets all: some ten minutes.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import pytest
from django.db.transaction import atomic
from django.http import HttpResponse
from django.test import Client
from pytest_django import DjangoDbBlocker

from controlplane.asgi import http_application
from controlplane.borders import TextMiddleware, TextRequest
from tests.controlplane.access.endpoints import pages
from tests.controlplane.api.client import bearer, document, resolved
from tests.controlplane.api.test_query_counts import one_more_of_everything
from tests.controlplane.api.test_whole_schema import something_there
from tests.controlplane.dashboard.clients import signed_in
from tests.controlplane.odd_values import (
    FORM,
    ODD_BODIES,
    ODD_JSON,
    ODD_TEXTS,
    Walk,
    bodies_of,
    filled,
    is_openai_error,
    places,
    with_odd,
)
from tests.rows_of_a_file import rows_of_a_file
from tests.traffic.rows import accepted, begun, jsonl, kept, line, serving_fleet, stored
from traffic.responses.api import _begin_response
from traffic.responses.services import ResponseSubmission, store_settings
from traffic.tenants.planner import ApplicationRefused
from traffic.tenants.selectors import Application

pytestmark = [pytest.mark.django_db, pytest.mark.timeout(3600), pytest.mark.slow]

ALL = 1000
EACH = ALL if "SWITCHYARD_FUZZ" in os.environ else 1
MODEL = "sim-70b"
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
    "n": 1, "max_tokens": 1, "temperature": 1, "stop": ["x"], "stream": False, "user": "u", "metadata": {"a": "b"},
}  # fmt: skip
BATCH: dict[str, Any] = {
    "input_file_id": "file-1", "endpoint": "/v1/embeddings", "completion_window": "24h", "metadata": {"a": "b"},
    "output_expires_after": {"anchor": "created_at", "seconds": 3600},
    "switchyard": {
        "completion_window": "4h", "priority": 5, "input_uri": "s3://bucket/in", "output_uri": "s3://bucket/out"
    },
}  # fmt: skip
RESPONSE: dict[str, Any] = {
    "model": MODEL, "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}], "store": True,
    "background": True, "instructions": "i", "previous_response_id": "resp_1", "metadata": {"a": "b"}, "stream": False,
}  # fmt: skip
PLAYGROUND: dict[str, Any] = {
    "deployment": MODEL, "region": "us-east-1", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1,
    "temperature": 0.5, "key": "",
}  # fmt: skip
BODIES: tuple[tuple[str, Any], ...] = (
    ("/v1/async/chat/completions", CHAT),
    ("/v1/async/completions", {"model": MODEL, "prompt": ["Hi"], "max_tokens": 1}),
    ("/v1/batches", BATCH),
    ("/v1/batches", {**BATCH, "switchyard": None}),
    ("/agents/enrol", {"kind": "node", "id": "n-1", "nonce": "x"}),
    ("/agents/join/check", {"port": 1, "nonce": "x"}),
    ("/agents/join/refused", {"reason": "x"}),
    ("/agents/join/attest", {"instance": "i-1", "nonce": "x", "url": "x", "headers": {"a": "b"}, "body": "x"}),
)
"""Of applications and agents, sent by POST."""
PLACES = (
    "GET /v1/async/{}", "DELETE /v1/async/{}",
    "GET /v1/batches", "GET /v1/batches/{}", "POST /v1/batches/{}/cancel",
    "GET /v1/files", "GET /v1/files/{}", "DELETE /v1/files/{}", "GET /v1/files/{}/content",
    "GET /v1/responses/{}", "DELETE /v1/responses/{}", "POST /v1/responses/{}/cancel",
    "GET /v1/responses/{}/input_items", "GET /v1/usage", "GET /v1/usage/errors", "GET /v1/nothing/{}",
)  # fmt: skip
UPLOAD = """--b\r
Content-Disposition: form-data; name="{field}"\r
\r
{odd}\r
--b\r
Content-Disposition: form-data; name="file"; filename="{name}"\r
\r
{content}\r
--b--\r
"""


@pytest.fixture(autouse=True)
def _no_limits(settings: Any, tmp_path: Path) -> None:
    settings.API_READS_PER_MIN = settings.API_WRITES_PER_MIN = settings.API_ANONYMOUS_REQUESTS_PER_MIN = 0
    settings.FILES = str(tmp_path / "files")


@pytest.fixture(scope="module", autouse=True)
def _one_of_everything(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    with rows_of_a_file(django_db_blocker):
        one_more_of_everything(0)
        yield


def operations() -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Path, path of something that is there, method and operation of the OpenAPI document."""
    for path, found in document()["paths"].items():
        known = filled(path, something_there(bearer(), path))
        for method, operation in found.items():
            yield path, known, method.upper(), operation


@pytest.mark.long
def test_the_api_takes_odd_texts_in_paths_and_queries() -> None:
    walk = Walk(bearer(), EACH)
    for path, known, method, operation in operations():
        for parameter in map(resolved, operation.get("parameters", ())):
            if parameter["in"] == "query":
                walk.texts("", method, known, [parameter["name"]])
            for name, odd in walk.odd(ODD_TEXTS) if parameter["in"] == "path" else ():
                walk.send(f"{name} as {parameter['name']}", method, filled(path, {parameter["name"]: odd}))
    assert not walk.wrong, "\n".join(walk.wrong)


def test_the_api_takes_odd_json_in_every_place_of_every_body() -> None:
    walk = Walk(bearer(), EACH)
    for _, known, method, operation in operations():
        for body in bodies_of(operation) if "requestBody" in operation else ():
            walk.bodies(method, known, body)
    assert not walk.wrong, "\n".join(walk.wrong)


@pytest.mark.parametrize("odd", ODD_JSON.values(), ids=ODD_JSON)
def test_engine_options_and_kinds_of_documents_take_every_odd_value(odd: str) -> None:
    """Free-form members, of which the document says little."""
    walk = Walk(bearer(), EACH)
    version = {"model": "model-0", "version": "9", "engine": "vllm", "artifact_uri": "file:///a", "engine_options": {}}
    for option in ("load_format", "speculative_config", "max_num_seqs", "override_generation_config"):
        body = {**version, "engine_options": {option: 1}}
        walk.send(option, "POST", "/api/v1/model-versions", with_odd(body, ("engine_options", option), odd))
    document = {"apiVersion": "switchyard/v1", "kind": "Deployment", "metadata": {"name": "x"}, "spec": {}}
    for place in places({"documents": [document]}):
        walk.send(f"{place}", "POST", "/api/v1/apply/preview", with_odd({"documents": [document]}, place, odd))
    assert not walk.wrong, "\n".join(walk.wrong)


def test_routes_of_applications_take_odd_texts_in_paths_and_queries() -> None:
    serving_fleet()
    ids = {"async": accepted().id, "batches": begun(jsonl(line(1))).id, "responses": kept(Application())}
    ids |= {"files": stored(jsonl(line(1))).id, "nothing": "x"}
    walk = Walk(Client(), ALL)
    for route in PLACES:
        method, _, path = route.partition(" ")
        for name, odd in ODD_TEXTS.items() if "{}" in path else ():
            walk.send(name, method, path.format(odd))
        known = path.format(ids.get(path.split("/")[2], ""))
        walk.texts("", method, known, walk.names_read(method, known))
    assert not walk.wrong, "\n".join(walk.wrong)


def test_routes_of_applications_and_agents_take_odd_json_in_every_place() -> None:
    serving_fleet()
    walk = Walk(Client(headers={"Authorization": "Bearer x"}), max(EACH, 6))
    applications = Walk(Client(), max(EACH, 6))
    for odd in ("[]", '{"a": 1}'):
        applications.send(odd, "POST", "/v1/batches", with_odd(BATCH, ("input_file_id",), odd))
    for path, body in BODIES:
        (applications if path.startswith("/v1/") else walk).bodies("POST", path, body)
    assert not walk.wrong + applications.wrong, "\n".join(walk.wrong + applications.wrong)


def test_a_response_that_is_created_takes_odd_json_in_every_place() -> None:
    serving_fleet()
    odd_bodies = [odd.encode("utf-8", "surrogateescape") for odd in ODD_BODIES.values()]
    odd_bodies += [with_odd(RESPONSE, place, odd).encode() for place in places(RESPONSE) for odd in ODD_JSON.values()]
    for body in odd_bodies:
        with suppress(ApplicationRefused), atomic():
            _begin_response(ResponseSubmission(body, {}, ""), store_settings())


def test_an_upload_takes_odd_texts_in_every_field() -> None:
    walk = Walk(Client(), ALL)
    for field in ("purpose", "expires_after[anchor]", "expires_after[seconds]", "other\0", "file"):
        for odd in ("", "a\0b", "\udcff", "\u202e", 20_000 * "x", 5000 * "9", "batch"):
            for name in ("in.jsonl", "a\0b", "\udcff", 20_000 * "x"):
                form = UPLOAD.format(field=field, odd=odd, name=name, content='{"body": {"model": "\\ud800"}}')
                walk.send(f"{odd[:9]!r} as {field}", "POST", "/v1/files", form, "multipart/form-data; boundary=b")
    assert not walk.wrong, "\n".join(walk.wrong)


@pytest.mark.long
def test_pages_take_odd_texts_in_paths_queries_and_forms() -> None:
    walk = Walk(signed_in(), EACH)
    for page in pages():
        if page.path in {"/playground/say/", "/playground/code/"}:
            continue
        kind = FORM if page.method == "POST" else ""
        walk.texts(page.name, page.method, page.path, walk.names_read(page.method, page.path), kind)
        for name, odd in walk.odd(ODD_TEXTS) if "/x/" in page.path else ():
            walk.send(f"{name} in the path of {page.name}", page.method, page.path.replace("/x/", f"/{odd}/"))
    assert not walk.wrong, "\n".join(walk.wrong)


def test_the_playground_takes_odd_json_in_every_place() -> None:
    serving_fleet()
    walk = Walk(signed_in(), EACH)
    for path in ("/playground/say/", "/playground/code/"):
        walk.bodies("POST", path, {**PLAYGROUND, "deployment": "x"})
    assert not walk.wrong, "\n".join(walk.wrong)


@pytest.mark.parametrize("path", ["/api/v1/cells", "/v1/files", "/agents/enrol", "/login/"])
@pytest.mark.parametrize("charset", ["utf-16", "utf-7", "raw_unicode_escape", "hex", "idna", 9000 * "x"])
def test_a_body_in_another_charset_is_refused(path: str, charset: str) -> None:
    walk = Walk(Client(), ALL)
    assert walk.send(charset, "POST", path, "a=1", f"{FORM}; charset={charset}").status_code == 415
    assert not walk.wrong


def test_a_charset_whose_name_holds_nul_is_refused() -> None:
    headers = [(b"host", b"localhost"), (b"content-type", b"text/plain; charset*=utf-8''a%00b")]
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": "/v1/files",
        "raw_path": b"/v1/files", "query_string": b"", "root_path": "", "headers": headers,
    }  # fmt: skip
    assert cast(Any, http_application).request_class is TextRequest
    refused = TextMiddleware(lambda request: HttpResponse())(TextRequest(scope, BytesIO()))
    assert (refused.status_code, is_openai_error(json.loads(refused.content))) == (415, True)


@pytest.mark.parametrize("path", ["/", "/api/v1/cells"])
def test_a_cookie_that_no_column_takes_is_no_cookie(path: str) -> None:
    client = signed_in()
    client.raise_request_exception = False
    cookies = "; ".join(rf'{name}="a\000b"' for name in client.cookies)
    client.cookies.clear()
    assert client.get(path, headers={"cookie": cookies}).status_code in {302, 401}


def test_what_is_odd_is_named_in_the_dialect_of_the_route() -> None:
    api = bearer().get("/api/v1/cells?state=%00")
    assert api.json()["errors"] == [{"field": "state", "rule": "storable", "message": api.json()["detail"]}]
    application = Client().get("/v1/files?after=%00").json()["error"]
    assert (application["type"], application["param"]) == ("invalid_request_error", "after")
    assert "&#x27;q&#x27; of the query has a character" in signed_in().get("/search/?q=%00").text
