"""What `/metrics` shows, under vLLM's names, in the Prometheus text format. It counts and never decides."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
"""vLLM 0.32, `vllm/v1/metrics/loggers.py` (its last buckets, beyond 160 s, left out)."""
ITL_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
REQUEST_BUCKETS_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)

ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Histogram:
    """Counts of observations by upper bound; the bounds are inclusive, as Prometheus has them."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """The samples in the text format, cumulative."""
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self._sum:.9g}"
        yield f"{name}_count{{{labels}}} {total}"


@dataclass
class Meters:
    """Everything counted since the process started."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    external_hits: int = 0
    """Prompt tokens that another engine had read."""
    failed_transfers: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    iteration_tokens: Histogram = field(default_factory=lambda: Histogram(ITERATION_BUCKETS))
    time_to_first_token_s: Histogram = field(default_factory=lambda: Histogram(TTFT_BUCKETS_S))
    inter_token_latency_s: Histogram = field(default_factory=lambda: Histogram(ITL_BUCKETS_S))
    queue_time_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS_S))
    latency_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS_S))


@dataclass(frozen=True)
class Gauges:
    """The state of the batch at the moment of a scrape. `kept`: prompts that wait for another engine; `expired`: those
    for which none came in time, since the engine started."""

    running: int
    waiting: int
    kv_cache_usage: float
    kept: int = 0
    expired: int = 0


def render(meters: Meters, gauges: Gauges, model_name: str) -> str:
    """The whole page, in the Prometheus text format 0.0.4."""
    escaped = model_name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    labels = f'engine="0",model_name="{escaped}"'
    lines: list[str] = []
    for name, help_text, value in (
        ("num_requests_running", "Number of requests in model execution batches.", gauges.running),
        ("num_requests_waiting", "Number of requests waiting to be processed.", gauges.waiting),
        ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", gauges.kv_cache_usage),
    ):
        lines += [*_head(name, "gauge", help_text), f"vllm:{name}{{{labels}}} {value:.6g}"]
    for name, help_text, total in (
        ("prompt_tokens", "Number of prefill tokens processed.", meters.prompt_tokens),
        ("generation_tokens", "Number of generation tokens processed.", meters.generation_tokens),
        ("prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.", meters.prefix_queries),
        ("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", meters.prefix_hits),
        ("external_prefix_cache_hits", "Tokens that came from another engine.", meters.external_hits),
        ("nixl_num_failed_transfers", "Number of failed transfers.", meters.failed_transfers),
        ("nixl_num_kv_expired_reqs", "Number of requests whose blocks nobody took.", gauges.expired),
    ):
        lines += [*_head(f"{name}_total", "counter", help_text), f"vllm:{name}_total{{{labels}}} {total}"]
    kept = "sim:kv_kept_requests"
    lines += [
        f"# HELP {kept} Prompts kept for other engines.",
        f"# TYPE {kept} gauge",
        f"{kept}{{{labels}}} {gauges.kept}",
    ]
    lines += _head("request_success_total", "counter", "Count of successfully processed requests.")
    for reason in ("stop", "length", "abort"):
        lines.append(f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {meters.finished[reason]}')
    for name, help_text, histogram in (
        ("iteration_tokens_total", "Histogram of number of tokens per engine_step.", meters.iteration_tokens),
        ("time_to_first_token_seconds", "Time to first token in seconds.", meters.time_to_first_token_s),
        ("inter_token_latency_seconds", "Inter-token latency in seconds.", meters.inter_token_latency_s),
        ("request_queue_time_seconds", "Time spent in the WAITING phase.", meters.queue_time_s),
        ("e2e_request_latency_seconds", "End to end request latency in seconds.", meters.latency_s),
    ):
        lines += [*_head(name, "histogram", help_text), *histogram.lines(f"vllm:{name}", labels)]
    return "\n".join(lines) + "\n"


def _head(name: str, kind: str, help_text: str) -> list[str]:
    return [f"# HELP vllm:{name} {help_text}", f"# TYPE vllm:{name} {kind}"]
