"""The playground: a chat with one deployment, or with two at the same time, through the ingress as applications do.
Validates the browser's request, sends it to the ingress in OpenAI's form and streams the answer, or returns code that
sends the same request. When the browser disconnects, the connection to the ingress is closed, which stops generation.
It never stores or logs a chat."""

import base64
import json
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from asgiref.sync import sync_to_async
from django.conf import settings
from django.db.models import Count, Q
from django.http import HttpRequest, HttpResponseBase, JsonResponse, StreamingHttpResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST

from audit.middleware import audit_exempt
from controlplane.chat_stream import ChatStreamParser, error_message
from controlplane.dashboard.fragments import Fragment, Page, PageRequest
from controlplane.dashboard.snippets import LANGUAGES, snippets
from engine_agent.protocol.request_bodies import Modality
from fleet.deployments.models import Deployment
from fleet.reconcile.planning.states import CellState
from fleet.regions.models import Region
from kernel.access import Role, access_of
from kernel.decoding import decode_json
from kernel.refusals import InvalidInput
from traffic.async_requests.selectors import ingress_addresses_by_region
from traffic.keys.planner import playground_key_text
from traffic.keys.selectors import key_ring_version
from traffic.routing.planning.tables import IngressAddress
from traffic.routing.services.ingress_client import ResponseHead, StreamBroken, StreamLimits, ingress_stream

MAX_BODY_BYTES = 2 * 1024 * 1024
"""An image of `MAX_IMAGE_BYTES` as base64, and text."""
MAX_IMAGE_BYTES = 1024 * 1024
IMAGE_STARTS = {"png": b"\x89PNG\r\n", "jpeg": b"\xff\xd8\xff", "gif": b"GIF8", "webp": b"RIFF"}
"""Type of an image -> its first bytes."""
IMAGE_URL = re.compile(r"data:image/([a-z]{3,4});base64,([A-Za-z0-9+/]{4,}={0,2})")
MAX_PARTS = 8
IMAGE_PLACE = "data:image/png;base64,BASE64_OF_YOUR_IMAGE"
MAX_MESSAGES = 100
MAX_TEXT = 65_536
MAX_TOKENS = 4096
ROLES = ("system", "user", "assistant")
MAX_NAME = 200
MAX_PARAMETERS = 32_768
OWN_PARAMETERS = ("model", "messages", "max_tokens", "temperature", "stream", "stream_options")
"""Set by the form's other fields."""
TIMED = {"queue": "queue_ms", "engine": "engine_ms"}
"""Metric of a cell's `server-timing` header -> its name in events."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """`region`: where the request enters. `parameters`: further members of the request, such as `top_p` or `tools`.
    `key` "": the internal key, if keys are required."""

    deployment: str
    region: str
    messages: tuple[Mapping[str, Any], ...]
    max_tokens: int
    temperature: float
    parameters: Mapping[str, Any]
    key: str

    @property
    def has_images(self) -> bool:
        return any(isinstance(one["content"], list) for one in self.messages)

    def request(self) -> dict[str, Any]:
        """The request to the ingress, in OpenAI's form."""
        return {
            "model": self.deployment,
            "messages": list(self.messages),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            **self.parameters,
            "stream": True,
        }

    def body(self) -> bytes:
        """The request with a count of its tokens at the end of the answer."""
        return json.dumps(self.request() | {"stream_options": {"include_usage": True}}).encode()


def parse_chat_request(body: bytes) -> ChatRequest:
    """Parse a request body. Raises InvalidInput if it is too long, not JSON, or a field is invalid; the message names
    it."""
    if len(body) > MAX_BODY_BYTES:
        raise _invalid("body", f"this chat is longer than {MAX_BODY_BYTES // 1024} KiB; start a new chat")
    try:
        payload = decode_json(body)
    except ValueError as error:
        raise _invalid("body", f"the request must be JSON: {error}") from None
    if not isinstance(payload, dict):
        raise _invalid("body", "the request must be a JSON object")
    return ChatRequest(
        deployment=_text_field(payload, "deployment", MAX_NAME),
        region=_text_field(payload, "region", MAX_NAME),
        messages=_messages(payload.get("messages")),
        max_tokens=int(_number(payload, "max_tokens", 256, 1, MAX_TOKENS)),
        temperature=_number(payload, "temperature", 0.7, 0, 2),
        parameters=_parameters(payload.get("parameters", "")),
        key=_key(payload.get("key", "")),
    )


def _messages(values: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(values, list) or not 1 <= len(values) <= MAX_MESSAGES:
        raise _invalid("messages", f"a chat has 1 to {MAX_MESSAGES} messages; start a new chat")
    messages = []
    for one in values:
        if not isinstance(one, dict) or one.get("role") not in ROLES:
            raise _invalid("messages", f"the role of each message must be one of {', '.join(ROLES)}")
        messages.append({"role": one["role"], "content": _content(one)})
    if messages[-1]["role"] != "user":
        raise _invalid("messages", "the last message must be the user's")
    return tuple(messages)


def _content(message: Mapping[str, Any]) -> str | list[dict[str, Any]]:
    """The text, or the parts of a user's message with images."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return _text_field(message, "content", MAX_TEXT)
    if message["role"] != "user" or not 1 <= len(parts) <= MAX_PARTS:
        raise _invalid("content", f"only the user's messages have parts, at most {MAX_PARTS}")
    return [_part(part) for part in parts]


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, dict) and part.get("type") == "text":
        return {"type": "text", "text": _text_field(part, "text", MAX_TEXT)}
    image = part.get("image_url") if isinstance(part, dict) and part.get("type") == "image_url" else None
    url = image.get("url") if isinstance(image, dict) else None
    if not isinstance(url, str):
        raise _invalid("content", "a part of a message must be text or an image")
    _check_image(url)
    return {"type": "image_url", "image_url": {"url": url}}


def _check_image(url: str) -> None:
    """Raises InvalidInput unless it is the data of a small image: no other address is sent to an engine."""
    found = IMAGE_URL.fullmatch(url)
    start = IMAGE_STARTS.get(found[1]) if found else None
    if found is None or start is None:
        raise _invalid("content", f"an image must be a file of type {', '.join(IMAGE_STARTS)}")
    try:
        data = base64.b64decode(found[2], validate=True)
    except ValueError:
        raise _invalid("content", "the image is not valid base64") from None
    if len(data) > MAX_IMAGE_BYTES:
        raise _invalid("content", f"the image has {len(data):,} bytes; the limit is {MAX_IMAGE_BYTES:,}")
    if not data.startswith(start):
        raise _invalid("content", f"the image is not a {found[1]} file")


def _parameters(text: Any) -> dict[str, Any]:
    """Further members of the request, typed as a JSON object; "" for none."""
    if not isinstance(text, str) or len(text) > MAX_PARAMETERS:
        raise _invalid("parameters", f"the parameters must be text of at most {MAX_PARAMETERS} characters")
    if not text.strip():
        return {}
    try:
        parameters = decode_json(text)
    except ValueError as error:
        raise _invalid("parameters", f"the parameters must be JSON: {error}") from None
    if not isinstance(parameters, dict):
        raise _invalid("parameters", 'the parameters must be a JSON object, such as {"top_p": 0.9}')
    if own := sorted(set(parameters) & set(OWN_PARAMETERS)):
        raise _invalid("parameters", f"{', '.join(own)}: use the form's own fields instead")
    return parameters


def _text_field(payload: Mapping[str, Any], name: str, longest: int) -> str:
    value = payload.get(name)
    if not isinstance(value, str) or not value.strip() or len(value) > longest:
        raise _invalid(name, f"{name} must be text of 1 to {longest} characters")
    return value


def _number(payload: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = payload.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise _invalid(name, f"{name} must be a number from {least:g} to {most:g}")
    return float(value)


def _key(value: Any) -> str:
    """The key becomes a header, so other characters are rejected."""
    if not isinstance(value, str) or len(value) > MAX_NAME:
        raise _invalid("key", "the key must be text")
    if value and not (value.startswith("sw_") and value.isascii() and value.replace("_", "").isalnum()):
        raise _invalid("key", "a Switchyard key starts with sw_ and has only letters, digits and _")
    return value


def _invalid(field: str, message: str) -> InvalidInput:
    return InvalidInput(field=field, rule="valid", message=message)


MAX_PER_USER = 3
MAX_PER_PROCESS = 32
"""A chat holds a connection for minutes, and the dashboard must stay responsive."""
LIMITS = StreamLimits()

_running: Counter[str] = Counter()


def chat_limit_reached(user: str) -> str:
    """Why this user may not start another chat now, "" if allowed."""
    if _running[user] >= MAX_PER_USER:
        return f"you have {MAX_PER_USER} chats running; stop one or wait until it ends"
    if _running.total() >= MAX_PER_PROCESS:
        return f"this server has reached its limit of {MAX_PER_PROCESS} chats; try again in a minute"
    return ""


async def stream_chat(
    user: str, ingress: IngressAddress, body: bytes, headers: dict[str, str], limits: StreamLimits = LIMITS
) -> AsyncGenerator[bytes, None]:
    """Events for the browser: `head` (the cell that serves), `text`, and finally `end` with figures, or `error`."""
    _running[user] += 1
    parser = ChatStreamParser(time.monotonic())
    try:
        async with aclosing(ingress_stream(ingress, "/v1/chat/completions", body, headers, limits)) as parts:
            async for event in _events(parts, parser):
                yield event
    except StreamBroken as broken:
        yield _event("error", {"message": str(broken), **parser.figures()})
    finally:
        _running[user] -= 1
        if not _running[user]:
            del _running[user]


async def _events(parts: AsyncIterator[ResponseHead | bytes], parser: ChatStreamParser) -> AsyncIterator[bytes]:
    status, body = 200, b""
    async for part in parts:
        if isinstance(part, ResponseHead):
            status = part.status
            yield _event("head", {"status": status, **_served_by(part)})
        elif status != 200:
            body += part
        else:
            for text in parser.feed(part, time.monotonic()):
                yield _event("text", {"text": text})
    if status != 200:
        yield _event("error", {"message": f"{status}: {_error_in(body)}", **parser.figures()})
    elif parser.error or not parser.is_done:
        message = parser.error or "the response ended early"
        yield _event("error", {"message": message, **parser.figures()})
    else:
        yield _event("end", parser.figures())


def _served_by(head: ResponseHead) -> dict[str, str]:
    served = {name: head.headers.get(f"x-switchyard-{name}", "") for name in ("cell", "region", "deployment")}
    return served | {"request_id": head.headers.get("x-request-id", ""), **_timing(head)}


def _timing(head: ResponseHead) -> dict[str, str]:
    """The cell's share of the time to the first token: `queue_ms` and `engine_ms`, if it states them."""
    stated = (part.strip().partition(";dur=") for part in head.headers.get("server-timing", "").split(","))
    return {TIMED[name]: ms for name, _, ms in stated if name in TIMED and ms.replace(".", "", 1).isdecimal()}


def _error_in(body: bytes) -> str:
    try:
        return error_message(json.loads(body))
    except ValueError:
        return body[:300].decode("utf-8", "replace")


def _event(kind: str, data: Mapping[str, object]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()


@dataclass(frozen=True, slots=True)
class DeploymentOption:
    """`images`: its version takes them."""

    name: str
    ready: int
    images: bool


@dataclass(frozen=True, slots=True)
class Playground:
    """`chosen`: the deployment that the page's URL names, else the first with a ready cell; `compared`: the second one
    that the URL names, or ""."""

    deployments: tuple[DeploymentOption, ...]
    regions: tuple[str, ...]
    keys_required: bool
    chosen: str
    compared: str
    languages: tuple[str, ...] = LANGUAGES
    image_types: str = ",".join(f"image/{kind}" for kind in IMAGE_STARTS)
    image_bytes: int = MAX_IMAGE_BYTES


def _playground(request: PageRequest) -> Playground:
    ready = Count("cells", filter=Q(cells__state=CellState.READY.value))
    columns = ("name", "ready", "model_version__modalities")
    rows = Deployment.objects.annotate(ready=ready).order_by("name").values_list(*columns)
    options = tuple(DeploymentOption(name, count, Modality.IMAGE in modalities) for name, count, modalities in rows)
    first = next((option.name for option in options if option.ready), "")
    return Playground(
        deployments=options,
        regions=tuple(sorted(ingress_addresses_by_region())),
        keys_required=key_ring_version().required,
        chosen=request.text("deployment") or first,
        compared=request.text("compared"),
    )


PLAYGROUND = Page(
    section="playground",
    title="Playground",
    # Without topics: a running chat is never refetched.
    fragments=(Fragment("playground", "", (), "dashboard/playground/chat.html", _playground),),
)


@never_cache
@require_POST
@audit_exempt("a chat is an inference request and changes nothing in the fleet")
async def playground_chat(request: HttpRequest) -> HttpResponseBase:
    """Streams events while the cell generates."""
    user = await request.auser()
    if not user.is_authenticated:
        return _error(401, "your session has ended; log in again")
    try:
        chat = parse_chat_request(request.body)
        if not await sync_to_async(_may_chat)(request, chat.deployment):
            return _error(403, f"chatting with {chat.deployment} needs the {Role.OPERATOR} role")
        ingress, headers = await sync_to_async(_ingress)(chat)
    except InvalidInput as invalid:
        return _error(400, str(invalid))
    if message := chat_limit_reached(user.get_username()):
        return _error(429, message)
    events = stream_chat(user.get_username(), ingress, chat.body(), headers)
    # Reverse proxies must not buffer the stream.
    return StreamingHttpResponse(events, content_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


@never_cache
@require_POST
@audit_exempt("code that sends a request changes nothing in the fleet")
def playground_code(request: HttpRequest) -> HttpResponseBase:
    """The chat of the form as code, by language. The code never contains the key."""
    if not request.user.is_authenticated:
        return _error(401, "your session has ended; log in again")
    try:
        chat = parse_chat_request(request.body)
        region = Region.objects.filter(name=chat.region).first()
        if region is None or not region.ingress_url:
            raise _invalid("region", f"region {chat.region!r} has no ingress")
    except InvalidInput as invalid:
        return _error(400, str(invalid))
    has_key = bool(chat.key) or key_ring_version().required
    request_shown = chat.request() | {"messages": [_without_images(one) for one in chat.messages]}
    return JsonResponse(snippets(region.ingress_url.rstrip("/"), request_shown, has_key=has_key))


def _without_images(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """With the place of an image's data instead of a megabyte."""
    if isinstance(message["content"], str):
        return message
    parts = [
        part if part["type"] == "text" else {"type": "image_url", "image_url": {"url": IMAGE_PLACE}}
        for part in message["content"]
    ]
    return {**message, "content": parts}


def _may_chat(request: HttpRequest, deployment: str) -> bool:
    """Generation uses capacity that applications pay for, so read access is not enough."""
    return access_of(request).may(Role.OPERATOR, deployment)


def _ingress(chat: ChatRequest) -> tuple[IngressAddress, dict[str, str]]:
    """The ingress, and the headers: with the user's key, else with the internal key, if keys are required."""
    deployment = Deployment.objects.select_related("model_version").filter(name=chat.deployment).first()
    if deployment is None:
        raise InvalidInput(field="deployment", rule="exists", message=f"deployment {chat.deployment!r} does not exist")
    if chat.has_images and Modality.IMAGE not in deployment.model_version.modalities:
        raise _invalid("messages", f"{deployment.model_version.reference} takes no images; start a new chat")
    ingresses = ingress_addresses_by_region().get(chat.region)
    if not ingresses:
        raise InvalidInput(field="region", rule="exists", message=f"region {chat.region!r} has no ingress")
    key = chat.key
    if not key and key_ring_version().required:
        key = playground_key_text(settings.SECRET_KEY)
    return ingresses[0], {"Authorization": f"Bearer {key}"} if key else {}


def _error(status: int, message: str) -> JsonResponse:
    return JsonResponse({"message": message}, status=status)
