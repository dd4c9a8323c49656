"""The proxy's measurements as Prometheus text (format 0.0.4). Only formatting."""

from collections.abc import Iterable, Mapping

from engine_agent.cell_proxy.cell import Cell
from engine_agent.cell_proxy.meter import Meter, cumulative
from engine_agent.protocol.load_messages import ClassLoad, UsageRow
from engine_agent.protocol.metrics import family, sample, single
from engine_agent.protocol.states import Phase

_PREFIX = "switchyard_proxy_"


def exposition(cell: Cell) -> str:
    """All metrics, labelled with the cell. There are three classes, and at most as many tenants as `UsageRows`
    keeps."""
    meter, labels = cell.meter, {"cell": cell.settings.cell}
    lines: list[str] = []
    lines += _by_class("requests_total", "counter", "Admitted requests, by class of the final status.", labels, meter)
    lines += _by_class("refused_total", "counter", "Requests that were not admitted, by reason.", labels, meter)
    lines += _single("errors_total", "counter", "Admitted requests that the cell failed.", labels, meter.errors_total)
    text = "Of these, failed without a byte of an answer: the ingress tries them elsewhere."
    lines += _single("handed_back_total", "counter", text, labels, meter.handed_back_total)
    lines += _of_relays(labels, meter)
    lines += _single("tokens_total", "counter", "Tokens generated for clients.", labels, meter.tokens_total)
    lines += _single("in_flight", "gauge", "Requests in flight.", labels, len(cell.in_flight))
    lines += _single("engine_healthy", "gauge", "1 while the engine is healthy.", labels, int(cell.health.ok))
    serving = int(cell.phase is Phase.SERVE)
    lines += _single("serving", "gauge", "1 while new requests are taken, health aside.", labels, serving)
    lines += _single("log_lines_dropped_total", "counter", "Log lines without a reader.", labels, cell.log.dropped)
    if cell.spans is not None:
        dropped = cell.spans.dropped
        lines += _single("spans_dropped_total", "counter", "Spans that no collector took.", labels, dropped)
    lines += _family("ttft_seconds", "histogram", "Time to the first token of streams.")
    for name, each in sorted(meter.classes.items()):
        lines += _histogram("ttft_seconds", {**labels, "class": name}, each.ttft.counts(), each.ttft.sum_s)
    batch = cell.batch.load()
    lines += _single("batch_running", "gauge", "Batch requests in the engine.", labels, batch.running)
    lines += _single("batch_waiting", "gauge", "Batch requests that wait in the cell.", labels, batch.waiting)
    lines += _single("batch_window", "gauge", "Batch requests that may be in the engine.", labels, batch.window)
    engine = cell.engine_load()
    if engine is not None:
        lines += _single("engine_running", "gauge", "Sequences in the engine's batch.", labels, engine.running)
        lines += _single("engine_waiting", "gauge", "Requests in the engine's queue.", labels, engine.waiting)
        text = "Sequences that left the engine's batch before their end."
        lines += _single("engine_preemptions_total", "counter", text, labels, engine.preemptions_total)
        if engine.kv_percent is not None:
            share = round(engine.kv_percent / 100, 3)
            lines += _single("engine_kv_used_ratio", "gauge", "Use of the engine's KV cache, 0 to 1.", labels, share)
    lines += _handovers(labels, cell)
    cache = cell.cache.load()
    lines += _single("cache_blocks", "gauge", "Blocks in the engine's prefix cache.", labels, cache.blocks)
    lines += _single("cache_prefixes", "gauge", "Beginnings of requests listed for ingresses.", labels, cache.prefixes)
    for total, text in _CACHE_TOTALS.items():
        lines += _single(f"cache_{total}", "counter", text, labels, getattr(cache, total))
    lines += [*_family("itl_seconds", "histogram", "Time between tokens of streams.")]
    itl_s = sum(each.itl.sum_s for each in meter.classes.values())
    lines += _histogram("itl_seconds", labels, meter.all_counts("itl"), itl_s)
    lines += _loads("class", labels, {name: each.load(0.0) for name, each in meter.classes.items()}, _CLASS_FIELDS)
    lines += _loads("tenant", labels, meter.usage.by_tenant(), _TENANT_FIELDS)
    return "\n".join(lines) + "\n"


def _of_relays(labels: Mapping[str, str], meter: Meter) -> list[str]:
    text = "Errors of streams that a relay continues elsewhere, or counts as cut."
    lines = _single("passed_on_total", "counter", text, labels, meter.passed_on_total)
    text = "Of the requests, streams that other cells had begun."
    return [*lines, *_single("continued_total", "counter", text, labels, meter.continued_total)]


def _handovers(labels: Mapping[str, str], cell: Cell) -> Iterable[str]:
    load = cell.handovers.load(0.0)
    if load is None:
        return
    counts = cell.handovers.counts
    yield from _single("handovers_total", "counter", "Prompts that a prefill cell read.", labels, load.handovers_total)
    yield from _single("handovers_in_flight", "gauge", "Handovers under way.", labels, load.in_flight)
    yield from _single("prefills_total", "counter", "Prompts read for decode cells.", labels, load.prefills_total)
    for name, text, reasons in (
        ("prompts_alone_total", "Prompts that the cell read by its own rules, by reason.", load.alone),
        ("handover_fallbacks_total", "Prompts that it read because a prefill cell failed it.", load.fallbacks),
    ):
        yield from _family(name, "counter", text)
        for reason in sorted(reasons):
            yield _sample(name, {**labels, "reason": reason}, reasons[reason])
    for name, text, histogram in (
        ("prefill_seconds", "Time of a prompt in a prefill cell.", counts.prefill),
        ("kv_transfer_seconds", "From there to the first byte of the answer.", counts.transfer),
    ):
        yield from _family(name, "histogram", text)
        yield from _histogram(name, labels, histogram.counts(), histogram.sum_s)


_CACHE_TOTALS = {
    "asked_tokens_total": "Prompt tokens of requests that were sent here by what is in the cache.",
    "predicted_tokens_total": "Of those, what was to be found.",
    "found_tokens_total": "Of those, what the engine found.",
    "other_tokens_total": "Prompt tokens of other requests.",
    "other_found_tokens_total": "Of those, what the engine found.",
}
_CLASS_FIELDS = ("in_flight", "prompt_tokens_total", "completion_tokens_total", "errors_total")
_TENANT_FIELDS = (
    "in_flight",
    "requests_total",
    "cancelled_total",
    "prompt_tokens_total",
    "cached_tokens_total",
    "completion_tokens_total",
    "estimated_total",
)


def _by_class(name: str, kind: str, text: str, labels: Mapping[str, str], meter: Meter) -> Iterable[str]:
    yield from _family(name, kind, text)
    for serving_class, each in sorted(meter.classes.items()):
        label, counts = ("code", each.answers) if name == "requests_total" else ("reason", each.refusals)
        for key in sorted(counts):
            yield _sample(name, {**labels, "class": serving_class, label: key}, counts[key])


def _loads(
    label: str, labels: Mapping[str, str], loads: Mapping[str, ClassLoad | UsageRow], fields: Iterable[str]
) -> Iterable[str]:
    """`class_…` or `tenant_…`: one family per field, one sample per class or tenant."""
    for field in fields:
        name = f"{label}_{field}"
        kind = "counter" if field.endswith("_total") else "gauge"
        yield from _family(name, kind, f"{field.removesuffix('_total').replace('_', ' ').capitalize()} by {label}.")
        for key in sorted(loads):
            yield _sample(name, {**labels, label: key}, getattr(loads[key], field))


def _family(name: str, kind: str, text: str) -> list[str]:
    return family(f"{_PREFIX}{name}", kind, text)


def _single(name: str, kind: str, text: str, labels: Mapping[str, str], value: float) -> list[str]:
    return single(f"{_PREFIX}{name}", kind, text, labels, value)


def _histogram(name: str, labels: Mapping[str, str], counts: Mapping[int, int], sum_s: float) -> list[str]:
    """`counts`: samples by bucket."""
    lines: list[str] = []
    for edge_s, count in cumulative(counts):
        lines.append(_sample(f"{name}_bucket", {**labels, "le": f"{edge_s:g}"}, count))
    total = sum(counts.values())
    lines.append(_sample(f"{name}_bucket", {**labels, "le": "+Inf"}, total))
    lines.append(_sample(f"{name}_sum", labels, round(sum_s, 6)))
    lines.append(_sample(f"{name}_count", labels, total))
    return lines


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    return sample(f"{_PREFIX}{name}", labels, value)
