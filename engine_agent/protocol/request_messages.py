"""Samples of a cell's requests, as its proxy takes them and its leader's agent sends them: a uniform sample, the
slowest, and the failed ones of each window. Ingresses send those that failed without a cell. A sample has names, counts
and times of a request, and never its text.
Every member is bounded, because the control plane stores what a node sends."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

WINDOW_S = 30.0
"""A window of samples: an error reaches its tenant's page within a minute."""
SAMPLES_OF_A_KIND = 16
"""Of one window and kind: 32 a minute. Statistics over half an hour then have hundreds of requests, and a window has
less than 20 KB."""
MAX_WINDOW_SAMPLES = 5 * SAMPLES_OF_A_KIND
"""Slow streams and slow whole answers are two kinds: their times to the first byte cannot be compared."""
REFUSALS_WITH_KEY, REFUSALS_WITHOUT_KEY = 32, 16
"""Of one window of an ingress. Together less than a window may have."""
REQUEST_ID_CHARS_MAX = 128

Name = Annotated[str, Meta(max_length=64)]
Count = Annotated[int, Meta(ge=0, le=1_000_000_000)]
Milliseconds = Annotated[float, Meta(ge=0, le=1e9)]


class SampleKind(StrEnum):
    UNIFORM = "uniform"
    """Of the uniform sample of answered requests, slow ones included."""
    SLOW = "slow"
    """One of the slowest streams or whole answers of its window, and not in the uniform sample."""
    LINKED = "linked"
    """Answered, with a trace of its client, and in neither of the other samples."""
    ERROR = "error"
    REFUSED = "refused"
    """Failed at an ingress without a valid key, so no tenant is known. Its own kind, because anyone can cause it."""


class RequestSample(Struct, frozen=True, omit_defaults=True):
    """One request. `at`: its arrival at the proxy, in seconds since 1970. `tenant` and `key` are empty without a key;
    `ingress` is the name in the certificate of its connection; `prefix` a hash of the beginning of its text. Names that
    are unknown are empty.

    Times: `ingress_ms` from its arrival at the ingress to that at the proxy, by the clocks of both machines; `queue_ms`
    until the engine got it, with the prompt's reading by a prefill cell; `first_ms` from its arrival at the proxy to
    its first token, or to a whole answer; `total_ms` to the end. They are None if the request did not get that far or
    the time is unknown.

    `in_flight`: requests in the cell when it arrived. `reason`: the code of a refusal. `is_handed_back`: the ingress
    tried another cell. `deployment`: from ingresses, if the request got as far as a pool.

    `trace`: the id of its client's W3C trace, in hexadecimal; only if the request is in the sample by traces. Each cell
    keeps the traces of a window with the lowest hashes, so two cells keep the same traces of a client that sends one
    request to each."""

    request: Annotated[str, Meta(max_length=REQUEST_ID_CHARS_MAX)]
    at: Annotated[float, Meta(ge=0, le=1e11)]
    kind: SampleKind
    status: Annotated[int, Meta(ge=0, le=999)]
    total_ms: Milliseconds
    tenant: Name = ""
    key: Annotated[str, Meta(max_length=16)] = ""
    serving_class: Annotated[str, Meta(max_length=16)] = ""
    adapter: Name = ""
    path: Name = ""
    ingress: Name = ""
    prefix: Annotated[str, Meta(max_length=12)] = ""
    reason: Name = ""
    is_stream: bool = False
    is_handed_over: bool = False
    is_handed_back: bool = False
    in_flight: Count = 0
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    completion_tokens: Count = 0
    ingress_ms: Milliseconds | None = None
    queue_ms: Milliseconds | None = None
    first_ms: Milliseconds | None = None
    deployment: Annotated[str, Meta(max_length=96)] = ""
    trace: Annotated[str, Meta(max_length=32, pattern="^([0-9a-f]{32})?$")] = ""


class RequestWindow(Struct, frozen=True, tag="requests"):
    """The samples of one window of a cell, sent once; a lost one is not repeated. `answered` and `failed`: all requests
    of the window, sampled or not. The samples of each kind are in the order in which a reader may cut them: the slowest
    first, others by chance. Empty `cell`: an ingress's, whose samples are all failed ones."""

    cell: Annotated[str, Meta(max_length=160)]
    generation: int
    since: Annotated[float, Meta(ge=0, le=1e11)]
    answered: Count
    failed: Count
    samples: Annotated[tuple[RequestSample, ...], Meta(max_length=MAX_WINDOW_SAMPLES)]


class ClosedWindows(Struct, frozen=True):
    """A proxy's answer to `GET /requests?after=N`: its last closed windows with a higher number, oldest first, and the
    number of the last one."""

    upto: int
    windows: tuple[RequestWindow, ...] = ()
