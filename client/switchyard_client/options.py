"""Options of clients and calls."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypedDict

import httpx

from switchyard_client.answers import Body
from switchyard_client.bodies import ChatMembers, EmbeddingsMembers, Message
from switchyard_client.failover import Retries

Messages = Sequence[Body] | Sequence[Message] | str
Inputs = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
ServingClass = Literal["realtime", "near_realtime", "batch"]


class CallOptions(TypedDict, total=False):
    """Options of one call. `deadline_s`: seconds after which the engine stops. `headers`: additional headers, such as
    `X-Switchyard-Class` for another class or `X-Session-Id`.

    `resumes`: an answer that breaks off is requested again, at the next region. The application gets what follows, if
    the repeat begins with the same text, and BrokenOff otherwise. Useful with temperature 0. Both requests are charged.
    """

    deadline_s: float | None
    headers: Mapping[str, str]
    resumes: bool


class ChatOptions(ChatMembers, CallOptions, total=False):
    """Members of a chat, and options of the call."""


class EmbeddingsOptions(EmbeddingsMembers, CallOptions, total=False):
    """Members of an embeddings request, and options of the call."""


class SubmitOptions(TypedDict, total=False):
    """Options of a near-real-time request. `deadline_s`: time limit of its outcome, 15 minutes by default. A default
    `idempotency_key` prevents a retry from creating a second request. `sink`: name of a sink that gets the outcome."""

    deadline_s: float | None
    callback_url: str
    sink: str
    idempotency_key: str


class ClientOptions(TypedDict, total=False):
    """Options of a client. `hedge_after_s`: without a first byte by then, the next region is tried as well, and the
    first answer wins; default: never. `trace`: returns headers for each attempt, such as `traceparent`. `connect_s` and
    `silence_s`: maximum time to connect, and between bytes; 5 and 600. `ca_file`: PEM file of the only trusted
    authorities. `proxy`: URL of a proxy; by default none is used, whatever the environment names."""

    api_key: str | None
    serving_class: ServingClass | None
    hedge_after_s: float | None
    retries: Retries
    connect_s: float
    silence_s: float
    trace: Callable[[], Mapping[str, str]]
    ca_file: str
    proxy: str
    transport: httpx.AsyncBaseTransport
