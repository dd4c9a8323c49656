"""The load of a cell, as its proxy measures it and its leader's agent reports it: requests, tokens, times, use by key,
and what its engine reports. Units are in the field names: `_s` seconds, `_ms` milliseconds, `_bytes` bytes."""

from msgspec import Struct, field


class ClassLoad(Struct, frozen=True):
    """One serving class's part of a cell's load. `refused_total` were rejected by admission."""

    in_flight: int = 0
    requests_total: int = 0
    errors_total: int = 0
    refused_total: int = 0
    prompt_tokens_total: int = 0
    completion_tokens_total: int = 0
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None


class BatchLoad(Struct, frozen=True, omit_defaults=True):
    """A cell's batch requests, in its engine and waiting. `window`: how many may be in the engine, limited by the
    latency of real-time requests. `is_alone`: there are no real-time requests, and the window is not in force.

    `baseline_…` are learned 95th percentiles of real-time requests without batch work; `recent_…` the average with it,
    since it began or the window shrank. They are None if unknown."""

    running: int = 0
    waiting: int = 0
    window: int = 0
    is_alone: bool = False
    is_over_budget: bool = False
    baseline_ttft_ms: float | None = None
    baseline_itl_ms: float | None = None
    recent_ttft_ms: float | None = None
    recent_itl_ms: float | None = None


class CacheLoad(Struct, frozen=True, omit_defaults=True):
    """A cell's prefix cache and its use. `is_known` False: the engine does not report it.

    It has `blocks` of `block_tokens` tokens; `prefixes` of requests are listed for ingresses. Of requests that an
    ingress routed by that list, `asked_tokens_total` are their prompt tokens, `predicted_tokens_total` those that
    should be in the cache, and `found_tokens_total` those that were. `other_found_tokens_total` were found for the
    `other_tokens_total` of all other requests."""

    is_known: bool = False
    blocks: int = 0
    block_tokens: int = 0
    prefixes: int = 0
    asked_tokens_total: int = 0
    predicted_tokens_total: int = 0
    found_tokens_total: int = 0
    other_tokens_total: int = 0
    other_found_tokens_total: int = 0


class UsageRow(Struct, frozen=True, omit_defaults=True):
    """The use of a cell by one key of one tenant in one class, for the model or one adapter. Totals started at 0 at
    `since`, in seconds since 1970.

    A reader adds totals of a different `since`: the proxy is another one, or had dropped the row. `tenant` is empty if
    no key was required, `key` (its prefix) if none was sent. Tokens of a request are counted when it has ended.
    `cached_tokens_total` are part of `prompt_tokens_total`. `cancelled_total`: requests that ended early because of
    their client, their deadline or the end of their cell. `errors_total`: requests that the cell failed.
    `estimated_total`: requests with estimated tokens, because no engine reported them."""

    since: float
    tenant: str = ""
    key: str = ""
    serving_class: str = "realtime"
    adapter: str = ""
    in_flight: int = 0
    requests_total: int = 0
    cancelled_total: int = 0
    errors_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    completion_tokens_total: int = 0
    estimated_total: int = 0


class TokenCheck(Struct, frozen=True):
    """Tokens by two counts from `since` (seconds since 1970) to an instant without client requests in flight: the
    growth of the engine's own metrics without the probes of its proxy, and the proxy's count."""

    since: float
    engine_prompt_total: int = 0
    engine_completion_total: int = 0
    counted_prompt_total: int = 0
    counted_completion_total: int = 0


class CellWork(Struct, frozen=True):
    """The work of a cell's engine while requests were in flight, in totals since `since` (seconds since 1970):
    `busy_ms` as its proxy saw it, and by the engine's own metrics its steps and their tokens. `cached_tokens` are part
    of `prompt_tokens`."""

    since: float
    busy_ms: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class HandoverLoad(Struct, frozen=True, omit_defaults=True):
    """Handovers of a cell since its proxy started.

    Of a decode cell: `handovers_total` requests whose prompts a prefill cell read, `in_flight` those without a first
    token yet; `alone` requests that it served alone by its rules, and `fallbacks` those that it served alone because a
    prefill cell failed, both by reason. Times cover the last 30 s: `prefill_…` until a prefill cell had answered,
    `transfer_…` from then to the first byte of the answer. None means no samples.

    Of a prefill cell: `prefills_total` prompts read for decode cells, `prefill_tokens_total` their tokens."""

    handovers_total: int = 0
    in_flight: int = 0
    alone: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)
    prefill_p50_ms: float | None = None
    prefill_p99_ms: float | None = None
    transfer_p50_ms: float | None = None
    transfer_p99_ms: float | None = None
    prefills_total: int = 0
    prefill_tokens_total: int = 0


class SpeculationLoad(Struct, frozen=True):
    """Speculative decoding of a cell's engine over the last `covered_s`, at most about an hour, by its own metrics:
    `drafts`, one per sequence and step with speculation; their `guessed_tokens`, and the `accepted_tokens` of them."""

    covered_s: float
    drafts: int = 0
    guessed_tokens: int = 0
    accepted_tokens: int = 0


MAX_TENANTS_REPORTED = 128
"""Rows of usage in a cell's load, without those of `OTHER_TENANTS`. At 300 bytes each they stay below the limit of a
frame."""
OTHER_TENANTS = "~others"
"""The tenant of the rows, one per class, that all further tenants share. No tenant can have this name."""


class EngineLoad(Struct, frozen=True, omit_defaults=True):
    """A cell's engine by its own metrics, at most 10 s old; idle engines are not polled and count as empty. `running`:
    sequences in its batch; `waiting`: requests in its queue; `kv_percent`: use of its KV cache, None if unknown.
    `preemptions_total` counts since the engine started: sequences that left the batch for lack of memory or for an
    urgent request."""

    running: int = 0
    waiting: int = 0
    kv_percent: float | None = None
    preemptions_total: int = 0


class Load(Struct, frozen=True):
    """Load of one cell, measured by its proxy. Percentiles and rates cover the last 30 s; None means no samples.

    `…_total` and `…_counts` count since the proxy started; `…_counts` maps a bucket of `engine_agent.protocol.metrics`
    to its number of samples, without empty buckets. `classes` and `usage` list only those with requests. `token_check`
    is None if the engine has no token counters or was never idle. `work` is None if it counts no steps. `engine` is
    None if it reports no batch. `batch` and `cache` are None from agents of the previous release. `handovers` is None
    if the cell is `mixed`. `speculation` is None without speculation in the last hour. `handed_back_total`: errors
    without a byte of an answer; the ingress retries such a request elsewhere, and counts it if that fails.
    `passed_on_total`: errors of streams that a relay continues elsewhere, and counts if it cannot. `continued_total`:
    requests that continue a stream of another cell, which counted the request."""

    in_flight: int = 0
    queued: int = 0
    tokens_per_s: float = 0.0
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    requests_total: int = 0
    errors_total: int = 0
    ttft_counts: dict[int, int] = field(default_factory=dict)
    itl_counts: dict[int, int] = field(default_factory=dict)
    classes: dict[str, ClassLoad] = field(default_factory=dict)
    usage: tuple[UsageRow, ...] = ()
    token_check: TokenCheck | None = None
    work: CellWork | None = None
    batch: BatchLoad | None = None
    handovers: HandoverLoad | None = None
    cache: CacheLoad | None = None
    speculation: SpeculationLoad | None = None
    handed_back_total: int = 0
    prompt_tokens_total: int = 0
    engine: EngineLoad | None = None
    passed_on_total: int = 0
    continued_total: int = 0
