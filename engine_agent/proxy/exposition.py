"""What the proxy measured, as Prometheus text (format 0.0.4). Only formatting; nothing is computed here."""

from collections.abc import Iterable, Mapping

from engine_agent.protocol.states import Phase
from engine_agent.proxy.cell import Cell
from engine_agent.proxy.histogram import SlidingHistogram

CONTENT_TYPE = b"text/plain; version=0.0.4"
_PREFIX = "switchyard_proxy_"


def exposition(cell: Cell) -> str:
    """All metrics, each labelled with the cell."""
    meter, labels = cell.meter, {"cell": cell.settings.cell}
    lines: list[str] = []
    lines += _family("requests_total", "counter", "Admitted requests, by class of the final status.")
    lines += _by_label("requests_total", labels, "code", meter.answers)
    lines += _family("refused_total", "counter", "Requests that were not admitted, by reason.")
    lines += _by_label("refused_total", labels, "reason", meter.refusals)
    lines += _single("errors_total", "counter", "Admitted requests that the cell failed.", labels, meter.errors_total)
    lines += _single("tokens_total", "counter", "Tokens generated for clients.", labels, meter.tokens_total)
    lines += _single("in_flight", "gauge", "Requests in flight.", labels, len(cell.in_flight))
    lines += _single("engine_healthy", "gauge", "1 while the engine is healthy.", labels, int(cell.judge.ok))
    serving = int(cell.phase is Phase.SERVE)
    lines += _single("serving", "gauge", "1 while new requests are taken, health aside.", labels, serving)
    lines += _single("log_lines_dropped_total", "counter", "Log lines nobody read.", labels, cell.log.dropped)
    lines += _histogram("ttft_seconds", "Time to the first token of streams.", labels, meter.ttft)
    lines += _histogram("itl_seconds", "Time between tokens of streams.", labels, meter.itl)
    return "\n".join(lines) + "\n"


def _family(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {_PREFIX}{name} {text}", f"# TYPE {_PREFIX}{name} {kind}"]


def _single(name: str, kind: str, text: str, labels: Mapping[str, str], value: float) -> list[str]:
    return [*_family(name, kind, text), _sample(name, labels, value)]


def _by_label(name: str, labels: Mapping[str, str], label: str, counts: Mapping[str, int]) -> Iterable[str]:
    return [_sample(name, {**labels, label: key}, counts[key]) for key in sorted(counts)]


def _histogram(name: str, text: str, labels: Mapping[str, str], histogram: SlidingHistogram) -> list[str]:
    lines = _family(name, "histogram", text)
    for edge_s, count in histogram.cumulative():
        lines.append(_sample(f"{name}_bucket", {**labels, "le": f"{edge_s:g}"}, count))
    lines.append(_sample(f"{name}_bucket", {**labels, "le": "+Inf"}, histogram.count))
    lines.append(_sample(f"{name}_sum", labels, round(histogram.sum_s, 6)))
    lines.append(_sample(f"{name}_count", labels, histogram.count))
    return lines


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    text = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
    return f"{_PREFIX}{name}{{{text}}} {value}"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
