"""Long, slow and numerous bodies in front of an application: each is refused in the form of its path, and delays only
its own tenant or network."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import User
from django.core.asgi import get_asgi_application
from django.db import connections

from accounts.models import ApiToken
from controlplane import request_bodies
from controlplane.request_bodies import OTHER_BYTES, BodyShares, FairPlaces, OverShare, RequestBodies
from kernel.secrets import secret_issue
from tests.engine_agent.fake_control_plane import eventually
from tests.fleet.rows import NOW
from traffic.batches.models import StoredFile
from traffic.files.services.files import file_settings
from traffic.keys.services import key_create
from traffic.responses.api import CreateResponse

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.asyncio, pytest.mark.slow]
PIECE = b"x" * 65536
APPLICATIONS, API, PAGE = "/v1/batches", "/api/v1/deployments/", "/login/"
BOUNDARY = "b0undary"
FORM = (
    f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n{{}}\n\r\n'
    f"--{BOUNDARY}--\r\n"
).encode()


@pytest.fixture(autouse=True)
def _web_of_a_test(settings: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings.FILES = str(tmp_path / "files")
    monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", 0)


async def key_of(tenant: str) -> str:
    new = await sync_to_async(lambda: key_create(name=tenant, tenant=tenant, actor="root", now=NOW))()
    return new.text


class Reading:
    """An application that takes in a whole body before it answers, as Django does."""

    def __init__(self) -> None:
        self.read = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            self.read += len(message["body"])
            if not message.get("more_body"):
                break
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


class Request:
    """One that sends its pieces when it is asked for them. A slow one leaves instead of sending its last one."""

    def __init__(self, path: str, *pieces: bytes, key: str = "", address: str = "203.0.113.7", **more: str) -> None:
        self.pieces, self.asked, self.is_slow, self.leaves = list(pieces), 0, False, asyncio.Event()
        length = {} if "content-length" in more else {"transfer-encoding": "chunked"}
        given = {**length, **({"authorization": f"Bearer {key}"} if key else {}), **more}
        headers = [(name.encode(), text.encode()) for name, text in given.items()]
        self.scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": [(b"host", b"127.0.0.1"), *headers], "client": (address, 5000), "server": ("127.0.0.1", 80),
            "scheme": "http", "http_version": "1.1",
        }  # fmt: skip
        self.sent: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        self.asked += 1
        if self.asked > len(self.pieces) or (self.is_slow and self.asked == len(self.pieces)):
            await self.leaves.wait()
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": self.pieces[self.asked - 1], "more_body": self.asked < len(self.pieces)}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    async def answered_by(self, application: RequestBodies) -> int:
        await application(self.scope, cast(Any, self.receive), cast(Any, self.send))
        return self.status

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])


def is_unused(shares: BodyShares) -> bool:
    return not shares._bodies and not shares._bytes


def upload(key: str) -> Request:
    return Request(
        "/v1/files", FORM[:40], FORM[40:], key=key,
        **{"content-type": f"multipart/form-data; boundary={BOUNDARY}", "content-length": str(len(FORM))},
    )  # fmt: skip


@asynccontextmanager
async def held(application: RequestBodies, made: list[Request]) -> AsyncIterator[None]:
    """While these wait before their last piece."""
    for request in made:
        request.is_slow = True
    tasks = [
        asyncio.create_task(application(each.scope, cast(Any, each.receive), cast(Any, each.send))) for each in made
    ]
    try:
        await eventually(lambda: all(each.asked == len(each.pieces) for each in made))
        yield
    finally:
        for request in made:
            request.leaves.set()
        await asyncio.gather(*tasks)


@pytest.mark.parametrize("path", [APPLICATIONS, API, PAGE])
@pytest.mark.parametrize("stated", [False, True])
async def test_a_body_that_is_too_long_is_refused_in_the_form_of_its_path(path: str, stated: bool) -> None:
    pieces = [PIECE] * (OTHER_BYTES // len(PIECE) + 100)
    length = {"content-length": str(10**12)} if stated else {}
    request, reading = Request(path, *pieces, **length), Reading()
    application = RequestBodies(cast(Any, reading))
    assert await request.answered_by(application) == 413
    assert request.asked == (0 if stated else OTHER_BYTES // len(PIECE) + 1)
    assert reading.read <= OTHER_BYTES
    assert is_unused(application.shares)
    if path == APPLICATIONS:
        assert json.loads(request.body)["error"]["code"] == "request_too_large"
    elif path == API:
        assert request.headers[b"content-type"] == b"application/problem+json"
        assert json.loads(request.body)["status"] == 413
    else:
        assert request.body == f"the body is longer than {OTHER_BYTES} bytes\n".encode()


@pytest.mark.parametrize("pieces", [1, OTHER_BYTES // len(PIECE)])
async def test_a_body_within_bounds_goes_through_whole(pieces: int) -> None:
    reading = Reading()
    assert await Request(API, *[PIECE] * pieces).answered_by(RequestBodies(cast(Any, reading))) == 200
    assert reading.read == pieces * len(PIECE)


@pytest.mark.parametrize(("may", "status"), [(True, 200), (False, 413)])
async def test_a_part_of_a_build_is_longer_if_a_valid_token_comes_before_it(may: bool, status: int) -> None:
    def token_text() -> str:
        issued, user = secret_issue(), User.objects.create_user("ada", is_active=may)
        ApiToken.objects.create(prefix=issued.prefix, digest=issued.digest, name="t", user=user, created_at=NOW)
        return issued.text

    request = Request(
        "/api/v1/engine-build-uploads/llama-1/part",
        *[PIECE] * (OTHER_BYTES // len(PIECE) + 1),
        key=await sync_to_async(token_text)(),
    )
    request.scope["method"] = "PUT"
    application = RequestBodies(cast(Any, Reading()))
    assert await request.answered_by(application) == status
    assert is_unused(application.shares)


@pytest.mark.parametrize("path", [APPLICATIONS, API, PAGE, "/v1/responses", "/v1/files", "/v1/async/completions"])
async def test_a_body_that_comes_too_slowly_is_refused_and_nothing_of_it_stays(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_bodies, "GRACE_S", 0.2)
    application, request = RequestBodies(cast(Any, Reading())), Request(path, b"x", b"y", key=await key_of("acme"))
    request.is_slow = True
    assert await request.answered_by(application) == 408
    assert is_unused(application.shares)


async def test_an_application_that_answers_before_it_reads_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_bodies, "GRACE_S", 0.2)
    reading = Reading()

    async def hasty(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})
        await reading(scope, receive, send)

    request = Request(API, b"x", b"y")
    request.is_slow = True
    assert await request.answered_by(RequestBodies(cast(Any, hasty))) == 401
    assert len(request.sent) == 2


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/files", "/v1/batches", "/v1/async/chat/completions"])
async def test_a_key_is_checked_before_a_byte_of_the_body_is_read(path: str) -> None:
    await key_of("acme")
    request = Request(path, b"x", key="sw_00000000000000_" + "5e" * 24)
    assert await request.answered_by(RequestBodies(cast(Any, Reading()))) == 401
    assert request.asked == 0
    assert json.loads(request.body)["error"]["code"] == "invalid_api_key"


async def test_slow_uploads_of_one_tenant_take_no_place_of_uploads() -> None:
    application = RequestBodies(cast(Any, get_asgi_application()))
    slow = [upload(await key_of("acme")) for _ in range(application.shares.most_bodies_of_one)]
    theirs, ours = await key_of("other"), await key_of("acme")
    assert len(slow) > file_settings().uploads_at_once
    async with held(application, slow):
        one_more = upload(ours)
        assert await one_more.answered_by(application) == 429, "the tenant's share of bodies is used up"
        assert b"still arriving" in one_more.body
        assert await upload(theirs).answered_by(application) == 200, "and another's is not"
    assert is_unused(application.shares)
    assert await sync_to_async(StoredFile.objects.count)() == 1, "what broke off left nothing"


async def test_slow_bodies_without_a_key_take_no_stream_and_only_the_share_of_their_network() -> None:
    application = RequestBodies(CreateResponse(cast(Any, get_asgi_application())))
    slow = [Request("/v1/responses", b"{", b"}") for _ in range(application.shares.most_bodies_of_one)]
    async with held(application, slow):
        assert await Request("/v1/responses", b"{}").answered_by(application) == 429
        elsewhere = Request("/v1/responses", b"{}", address="198.51.100.1")
        assert await elsewhere.answered_by(application) == 400, "it is read, and names no model"
        of_this_host = Request("/v1/responses", b"{}", address="127.0.0.1")
        assert await of_this_host.answered_by(application) == 400


async def test_bytes_of_bodies_are_bounded_by_owner_and_for_all_until_their_requests_end() -> None:
    application = RequestBodies(cast(Any, Reading()))
    application.shares.most_bytes_of_one, application.shares.most_bytes = 100, 150
    async with held(application, [Request(API, b"x" * 90, b"")]):
        assert await Request(API, b"x" * 20).answered_by(application) == 429
        too_many = Request(API, b"x" * 70, address="198.51.100.1")
        assert await too_many.answered_by(application) == 503
        assert b"retry-after" in too_many.headers
        assert await Request(API, b"x" * 50, address="198.51.100.1").answered_by(application) == 200
    assert await Request(API, b"x" * 100).answered_by(application) == 200


async def test_an_owner_with_many_requests_waits_for_its_own_places_and_others_do_not() -> None:
    places = FairPlaces(most=3, most_of_one=2)
    async with (
        places.taken("acme", has_share=True, within_s=60),
        places.taken("acme", has_share=True, within_s=60),
    ):
        with pytest.raises(OverShare):
            async with places.taken("acme", has_share=True, within_s=0):
                pass
        async with places.taken("other", has_share=True, within_s=60):
            with pytest.raises(OverShare) as full:
                async with places.taken("third", has_share=True, within_s=0):
                    pass
            assert full.value.is_of_all
    async with places.taken("acme", has_share=True, within_s=0):
        pass
