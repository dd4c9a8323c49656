"""A light client of Switchyard's ingresses, over httpx: several regions with failover, deadlines, serving classes,
retries by `Retry-After`, hedged first tokens, near-real-time requests and their callbacks. Sync and async.

It sends bodies of OpenAI's or Anthropic's API and returns the engine's answers. A request is never sent again after a
byte of its answer. `Failover` decides the order of regions; it is pure."""

from switchyard_client.answers import (
    CALLBACK_TOLERANCE_S,
    Answer,
    ApiError,
    BadCallback,
    Body,
    BrokenOff,
    Budget,
    DeadlineExceeded,
    Event,
    NoAnswer,
    Pending,
    SwitchyardError,
    Usage,
    verify_callback,
)
from switchyard_client.async_client import AsyncSwitchyard
from switchyard_client.events import MAX_EVENT_BYTES
from switchyard_client.failover import Attempt, Failover, Retries
from switchyard_client.options import (
    CallOptions,
    ChatOptions,
    ClientOptions,
    EmbeddingsOptions,
    Inputs,
    Messages,
    ServingClass,
    SubmitOptions,
)
from switchyard_client.sync_client import Switchyard

__all__ = [
    "CALLBACK_TOLERANCE_S", "MAX_EVENT_BYTES", "Answer", "ApiError", "AsyncSwitchyard", "Attempt", "BadCallback",
    "Body", "BrokenOff", "Budget", "CallOptions", "ChatOptions", "ClientOptions", "DeadlineExceeded",
    "EmbeddingsOptions", "Event", "Failover", "Inputs", "Messages", "NoAnswer", "Pending", "Retries", "ServingClass",
    "SubmitOptions", "Switchyard", "SwitchyardError", "Usage", "verify_callback",
]  # fmt: skip
