"""Rewrites request bodies on their way to the engine. Pure. Adds members to the JSON object of a request: the priority
of its class, the request for a usage count, and the engine's name of the model. They come last, where they override the
same names. A body that an engine could read differently from the ingress or this proxy is refused (`request_of`).
Bodies are sent as a whole, because an unread one could mean anything (`Upload`)."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from engine_agent.cell_proxy import refusal as refusals
from engine_agent.cell_proxy.admission import BadHeader, RequestMetadata, read_limits
from engine_agent.cell_proxy.api_paths import CELL_PATHS, CHAT_PATH, RESPONSES_PATH
from engine_agent.cell_proxy.refusal import Refusal
from engine_agent.cell_proxy.request_work import check_sequences, check_work
from engine_agent.cell_proxy.settings import EngineMembers, ProxySettings
from engine_agent.cell_proxy.wire import ENGINE_PRIORITY_HEADER, Headers, RequestHead, request_head
from engine_agent.protocol.api_surface import ApiPath, Counting
from engine_agent.protocol.continuation import CONTINUATION_HEADER, CONTINUATION_MEMBER
from engine_agent.protocol.request_bodies import MODALITY_OF_PART, BadRequest, part_not_taken
from engine_agent.protocol.request_checks import check_request
from engine_agent.protocol.request_limits import RequestLimits
from engine_agent.protocol.states import ServingClass
from engine_agent.protocol.strict_json import strict_loads

PRIORITIES = {ServingClass.REALTIME: 0, ServingClass.NEAR_REALTIME: 100, ServingClass.BATCH: 200}
"""vLLM serves lower numbers first, and earlier requests first among equals."""
_BLANKS = b" \t\r\n"


class BadBody(ValueError):
    """A request body with more than one meaning; the text says why."""


class NeedsStore(ValueError):
    """A request that needs stored responses of the control plane, and bypassed it. The text is the member's name."""


class BodyRewrite(msgspec.Struct, frozen=True):
    """`members`: JSON text without braces. `removes_usage`: the client did not request the usage that is requested.
    `sequences`: those of the request in the engine."""

    members: bytes = b""
    removes_usage: bool = False
    sequences: int = 1


def rewrite_body(
    path: bytes,
    body: bytes,
    priority: int | None,
    model: str | None = None,
    routed_by: str | None = None,
    limits: RequestLimits | None = None,
    engine: EngineMembers = EngineMembers(),  # noqa: B008 (it is frozen)
    *,
    is_replay: bool = False,
) -> BodyRewrite:
    """The members to add to a request. `priority` None: the engine has none; `limits` None: another cell has checked
    them. `model`: the engine's name, None for the one in the request. `routed_by`: the name that the ingress read in
    the body, None if unknown. `engine`: what clients may not set freely. `is_replay`: a relay sent it. Raises BadBody
    (see `request_of`; or the body names another model than the ingress read in it). Raises BadRequest (see
    `check_request` and `check_work`). Raises NeedsStore if it is a response that an engine, which keeps nothing, would
    answer as if it were a plain one."""
    row = CELL_PATHS.get(path)
    if row is None or not row.has_model or body == b"":
        return BodyRewrite()
    priority = priority if row.has_priority else None
    request = request_of(body)
    if is_replay:
        request.pop(CONTINUATION_MEMBER, None)
    check_request(path.decode(), request)
    sequences = 1 if limits is None else check_work(row, request, limits)
    _check_members(row, request, engine)
    if path == RESPONSES_PATH:
        _check_needs_no_store(request)
    given = request.get("model")
    if routed_by is not None and given != routed_by:
        raise BadBody(f"the ingress read the model {routed_by!r:.200} in it, and here it names {given!r:.200}")
    members = [_model(model)] if model is not None and isinstance(given, str) and given != model else []
    if priority is not None and (priority or request.get("priority") is not None):
        members.append(_priority(priority))
    options = None
    if request.get("stream") is True and row.counting is Counting.STREAM_OPTIONS:
        options = _usage_options(request)
    members += dialect_members(path, request)
    for name, value in engine.fixed.items():
        if name in request:
            members.append(b'"%b":%b' % (name.encode(), bytes(value)))
    if options is not None:
        members.append(b'"stream_options":' + msgspec.json.encode(options))
    return BodyRewrite(b",".join(members), removes_usage=options is not None, sequences=sequences)


def request_of(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises BadBody if it is none, or readers could differ in what it states
    (`strict_loads`)."""
    try:
        request = strict_loads(body)
    except ValueError as error:
        raise BadBody(str(error)) from None
    if not isinstance(request, dict):
        raise BadBody("it must be an object")
    return request


_URL_PARTS: Final = ("image_url", "input_audio", "audio_url", "video_url", "image_embeds")
"""vLLM reads a part without a type by the first of its members."""
_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "refusal"})


def _check_members(row: ApiPath, request: dict[str, Any], engine: EngineMembers) -> None:
    if engine.paths is not None and row.path not in engine.paths:
        message = f"This model has another API, so {row.path} is not available for it"
        raise BadRequest(message, "model", status=404, code="unsupported_model")
    if engine.text_only and _has_other_parts(request.get("messages")):
        message = "This model takes text alone: no images, sounds, videos or files"
        raise BadRequest(message, "messages", code="unsupported_parameter")
    _check_modalities(request, engine)
    if engine.schema_paths is not None and row.path not in engine.schema_paths:
        _check_without_schema(request)
    for name in sorted(engine.refused.intersection(request)):
        raise BadRequest(f"`{name}` is not available for this model", name, code="unsupported_parameter")
    if engine.sequences is not None and row.counting is not Counting.PROMPT_USAGE:
        check_sequences(request, engine.sequences)


_FORMATS: Final = (("response_format", ""), ("text", "format"), ("output_format", ""), ("output_config", "format"))


def _check_without_schema(request: dict[str, Any]) -> None:
    for name, inner in _FORMATS:
        value = request.get(name)
        value = value.get(inner) if inner and isinstance(value, dict) else value
        if isinstance(value, dict) and value.get("type", "text") != "text":
            message = f"`{name}` is available for chats of this model only: send the request to {CHAT_PATH.decode()}"
            raise BadRequest(message, name, code="unsupported_parameter")


def _has_other_parts(messages: Any) -> bool:
    """Whether a message has a part that is not text."""
    listed = messages if isinstance(messages, list) else []
    contents = [each.get("content") for each in listed if isinstance(each, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    is_object = any(isinstance(content, dict) for content in contents)
    return is_object or any(isinstance(part, dict) and part.get("type") not in _TEXT_PARTS for part in parts)


def _check_modalities(request: dict[str, Any], engine: EngineMembers) -> None:
    """Raises BadRequest for content that the version does not serve. Text-only engines return different errors, or
    ignore it."""
    for name in ("messages", "input"):
        if not isinstance(request.get(name), list):
            continue
        for kind in _kinds_of_parts(request.get(name)):
            if (modality := MODALITY_OF_PART.get(kind)) is not None and modality not in engine.modalities:
                raise part_not_taken(kind, name, engine.modalities)


def _kinds_of_parts(messages: Any) -> Iterator[str]:
    """Types of parts in messages, and in results of calls within them."""
    for each in messages if isinstance(messages, list) else ():
        if not isinstance(each, dict):
            continue
        for parts in (each.get("content"), each.get("output")):
            for part in parts if isinstance(parts, list) else ():
                if isinstance(part, dict) and not _is_malformed(part):
                    yield str(part.get("type") or next((kind for kind in _URL_PARTS if kind in part), ""))
                    yield from _kinds_of_parts([part])


def _is_malformed(part: dict[str, Any]) -> bool:
    """Whether every engine refuses it, with a better reason."""
    return part.get("type") == "image_url" and not isinstance(part.get("image_url"), dict)


def _check_needs_no_store(request: dict[str, Any]) -> None:
    """Requests that the control plane forwards have none of these members."""
    for name in ("previous_response_id", "conversation"):
        if request.get(name) is not None:
            raise NeedsStore(name)
    for name in ("background", "store"):
        if request.get(name):
            raise NeedsStore(name)


def _usage_options(request: dict[str, Any]) -> dict[str, Any] | None:
    """The client's stream options with usage; None if it requests usage already, or if they are invalid."""
    options = request.get("stream_options")
    if options is None:
        return {"include_usage": True}
    if not isinstance(options, dict) or options.get("include_usage") not in {None, False}:
        return None
    return {**options, "include_usage": True}


def _model(name: str) -> bytes:
    return b'"model":' + msgspec.json.encode(name)


def _priority(priority: int) -> bytes:
    return b'"priority":%d' % priority


def with_members(body: bytes, members: bytes) -> bytes:
    """The JSON object with these members at its end. Anything else is unchanged."""
    end = len(body.rstrip(_BLANKS))
    if not members or body[end - 1 : end] != b"}":
        return body
    inside = body[: end - 1]
    separator = b"" if inside.rstrip(_BLANKS).endswith(b"{") else b","
    return inside + separator + members + body[end - 1 :]


# Members that replace the client's where the engine reads those differently from the API of the path.

_WITH_TOOLS: Final = (CHAT_PATH, b"/v1/messages", b"/v1/messages/count_tokens")
_NO_CHOICES: Final = (None, "auto", "none", {"type": "auto"}, {"type": "none"})


def dialect_members(path: bytes, request: Mapping[str, Any]) -> list[bytes]:
    """Overriding members as JSON text: no tools instead of an empty list, which clients send and vLLM refuses."""
    if path not in _WITH_TOOLS or request.get("tools") != []:
        return []
    if "tool_choice" not in request:
        return [b'"tools":null']
    return [b'"tools":null', b'"tool_choice":null'] if request["tool_choice"] in _NO_CHOICES else []


class Upload:
    """The body of one request. `repeat_limit_bytes`: a longer one is released once it is sent. `members` are appended
    to the JSON object of the body. Set them before the first `opening`."""

    __slots__ = (
        *("_head", "_pieces", "_repeat_limit_bytes"),
        *("complete", "headers", "members", "size_bytes"),
    )

    def __init__(self, head: RequestHead, repeat_limit_bytes: int) -> None:
        self._head = head
        self._repeat_limit_bytes = repeat_limit_bytes
        self._pieces: list[bytes] | None = []
        self.members = b""
        self.headers: Headers = []
        """Headers that the engine gets in addition to the client's."""
        self.size_bytes = 0
        """Of the received body, so far."""
        self.complete = False

    @property
    def repeatable(self) -> bool:
        """Whether it is kept after it was sent, to be sent again."""
        return self.size_bytes <= self._repeat_limit_bytes

    def add(self, data: bytes, *, complete: bool) -> None:
        """Adds the next piece. None arrives after it was sent."""
        self.complete = complete
        if data and self._pieces is not None:
            self.size_bytes += len(data)
            self._pieces.append(data)

    def add_members(self, members: bytes) -> None:
        self.members = b",".join(filter(None, (self.members, members)))

    def whole(self) -> bytes:
        """The body as received. Raises ValueError if it was released."""
        if self._pieces is None:
            raise ValueError("the body was already released")
        self._pieces = [b"".join(self._pieces)]
        return self._pieces[0]

    def opening(self, host: bytes) -> bytes:
        """Head and body for an engine connection. Raises ValueError if it is not `repeatable` and was sent before."""
        body = with_members(self.whole(), self.members)
        if not self.repeatable:
            self.forget()
        has_body = self._head.content_length is not None or self._head.chunked
        framing = b"content-length: %d\r\n" % len(body) if has_body else b""
        return request_head(self._head, host=host, framing=framing, own=self.headers) + body

    def forget(self) -> None:
        self._pieces = None


def _is_encoded(headers: Headers) -> bool:
    return any(name == b"content-encoding" and value.lower() != b"identity" for name, value in headers)


def prepare(
    head: RequestHead, upload: Upload, metadata: RequestMetadata, settings: ProxySettings
) -> BodyRewrite | Refusal:
    """Adds the fleet's members and headers to `upload`, or returns a refusal."""
    if b"content-encoding" in head.named and _is_encoded(head.headers):
        return refusals.body_encoded()
    if metadata.replayed is not None and not settings.replays:
        return refusals.not_continued()
    priority = PRIORITIES[metadata.serving_class] if settings.priorities else None
    model = (metadata.adapter or settings.model) if metadata.is_routed else None
    try:
        rewrite = rewrite_body(
            head.path,
            upload.whole(),
            priority,
            model,
            metadata.routed_by,
            read_limits(head.named),
            settings.members,
            is_replay=metadata.replayed is not None,
        )
    except BadHeader as error:
        return error.refusal
    except BadRequest as error:
        return refusals.bad_member(error)
    except NeedsStore as member:
        return refusals.needs_store(str(member))
    except BadBody as error:
        return refusals.bad_body(str(error))
    if metadata.is_marked and settings.replays:
        upload.headers.append((CONTINUATION_HEADER, b"on"))
    if priority:
        upload.headers.append((ENGINE_PRIORITY_HEADER, b"%d" % priority))
    upload.members = rewrite.members
    return rewrite
