"""Reads and writes workloads (`1000+150`, `3000+200,arrival=uniform,prefix=512,groups=8`, `mooncake,longest=4096`) and
objectives, and defines the states of a benchmark and the key by which benchmarks are compared. Prompts are token ids,
so that every engine counts the same number; engines that do not accept ids receive words. Equal keys mean the same
measurement; equal `conditions` differ only in the version. Pure: it never draws a request."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import msgspec

from kernel.tones import Tone
from models_registry.versions.planning.spec import VersionSpec

MOST_TOKENS = 131_072


class InvalidWorkload(ValueError):
    """The workload or objective cannot be read; the text names the error and the expected form."""


class Arrival(StrEnum):
    """`poisson`: independent. `uniform`: evenly spaced. `trace`: as recorded, scaled to the rate."""

    POISSON = "poisson"
    UNIFORM = "uniform"
    TRACE = "trace"


class Prompts(StrEnum):
    """`ids`: token ids. `words`: text of about one token per word."""

    IDS = "ids"
    WORDS = "words"


TRACES: Mapping[str, str] = MappingProxyType(
    {"azure": "azure_llm_2023_conv.csv.xz", "mooncake": "mooncake_conversation.jsonl.xz"}
)
"""Recorded traffic in models_registry/traces."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths in tokens. A trace has its own lengths, cut to `longest` in total; then `prompt` and `output` are 0.

    `sigma` is the spread of log-normal lengths around their medians (0: constant). The first `prefix` tokens of each
    prompt are one of `groups` texts."""

    source: str
    prompt: int = 0
    output: int = 0
    sigma: float = 0.0
    prefix: int = 0
    groups: int = 1
    arrival: Arrival = Arrival.POISSON
    prompts: Prompts = Prompts.IDS
    longest: int = 4096

    @property
    def text(self) -> str:
        stated = [f"{self.prompt}+{self.output}" if self.source == "synthetic" else self.source]
        plain = Workload(self.source, self.prompt, self.output, arrival=_usual(self.source))
        stated += [
            f"{name}={getattr(self, name):g}" if name == "sigma" else f"{name}={getattr(self, name)}"
            for name in OPTIONS
            if getattr(self, name) != getattr(plain, name)
        ]
        return ",".join(stated)

    @property
    def digest(self) -> str:
        return digest_of(msgspec.to_builtins(self))


OPTIONS = ("sigma", "prefix", "groups", "arrival", "prompts", "longest")


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits of a request: seconds to its first token, and mean seconds between tokens."""

    ttft_s: float
    itl_s: float

    @property
    def text(self) -> str:
        return f"ttft={self.ttft_s * 1000:g},itl={self.itl_s * 1000:g}"

    @property
    def as_json(self) -> dict[str, float]:
        return {"ttft_ms": round(self.ttft_s * 1000, 6), "itl_ms": round(self.itl_s * 1000, 6)}

    def is_inside(self, ttft_s: float, end_s: float, tokens: int) -> bool:
        """Whether a request with its first token after `ttft_s` and all `tokens` after `end_s` meets the objective."""
        return ttft_s <= self.ttft_s and (tokens < 2 or (end_s - ttft_s) / (tokens - 1) <= self.itl_s)

    def longest_s(self, tokens: float) -> float:
        """Longest duration of a request of this many tokens that meets the objective."""
        return self.ttft_s + self.itl_s * max(0.0, tokens - 1)


def parse_workload(text: str) -> Workload:
    """Read a workload. Raises InvalidWorkload if it has no source, an unknown option, or a value out of bounds."""
    source, *stated = [part.strip() for part in text.split(",")]
    base = _base(source)
    fields: dict[str, Any] = {}
    for part in stated:
        name, equals, value = part.partition("=")
        if name not in OPTIONS or not equals or name in fields:
            raise InvalidWorkload(
                f"workload has {part!r}; after its source it may have each of these once: {_choices()}"
            )
        fields[name] = value
    return _check_workload(base, fields)


def _base(source: str) -> Workload:
    if source in TRACES:
        return Workload(source, arrival=Arrival.TRACE)
    prompt, plus, output = source.partition("+")
    if not plus or not prompt.isascii() or not (prompt + output).isdigit() or not prompt or not output:
        known = " or ".join(TRACES)
        raise InvalidWorkload(f"workload begins with {source[:40]!r}; it must be PROMPT+OUTPUT (1000+150) or {known}")
    lengths = [_parse_whole("workload", part, 1, MOST_TOKENS) for part in (prompt, output)]
    if sum(lengths) > MOST_TOKENS:
        raise InvalidWorkload(f"workload has {source}; prompt and output may have {MOST_TOKENS} tokens in total")
    return Workload("synthetic", lengths[0], lengths[1])


def _check_workload(base: Workload, stated: Mapping[str, str]) -> Workload:
    is_trace = base.source in TRACES
    if is_trace and (wrong := sorted(stated.keys() & {"sigma", "prefix", "groups"})):
        raise InvalidWorkload(f"workload {base.source} has {wrong[0]}; a trace has its own lengths and prefixes")
    arrival = _choice("arrival", stated.get("arrival", base.arrival), Arrival)
    if arrival is Arrival.TRACE and not is_trace:
        raise InvalidWorkload("workload has arrival=trace; without a trace it must be poisson or uniform")
    prefix = _parse_whole("prefix", stated.get("prefix", "0"), 0, max(0, base.prompt - 1))
    return Workload(
        base.source,
        base.prompt,
        base.output,
        _sigma(stated.get("sigma", "0")),
        prefix,
        _parse_whole("groups", stated.get("groups", "1"), 1, 100_000),
        arrival,
        _choice("prompts", stated.get("prompts", base.prompts), Prompts),
        _parse_whole("longest", stated.get("longest", str(base.longest)), 2, MOST_TOKENS),
    )


def parse_slo(text: str) -> Slo:
    """Read `ttft=500,itl=50`, in milliseconds. Raises InvalidWorkload if one of them is missing or is not a number
    above 0."""
    stated = dict(part.strip().partition("=")[::2] for part in text.split(","))
    if stated.keys() != {"ttft", "itl"}:
        raise InvalidWorkload(f"slo is {text[:60]!r}; it must be ttft=MS,itl=MS, such as ttft=500,itl=50")
    ttft_ms, itl_ms = (_number(f"slo {name}", stated[name], 0.1, 600_000) for name in ("ttft", "itl"))
    return Slo(ttft_ms / 1000, itl_ms / 1000)


def digest_of(value: Any) -> str:
    """Sixteen hexadecimal digits, equal exactly for equal JSON values."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _usual(source: str) -> Arrival:
    return Arrival.TRACE if source in TRACES else Arrival.POISSON


def _choices() -> str:
    return ", ".join(f"{name}=" for name in OPTIONS)


def _parse_whole(name: str, text: str, low: int, high: int) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not low <= int(text) <= high:
        raise InvalidWorkload(f"{name} is {text[:40]!r}; it must be a whole number from {low} to {high}")
    return int(text)


def _sigma(text: str) -> float:
    return _number("sigma", text, 0, 3)


def _number(name: str, text: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not low <= value <= high:
        raise InvalidWorkload(f"{name} is {text[:40]!r}; it must be a number from {low:g} to {high:g}")
    return value


def _choice(name: str, text: str, kind: Any) -> Any:
    if text not in set(kind):
        raise InvalidWorkload(f"{name} is {text[:40]!r}; it must be {' or '.join(kind)}")
    return kind(text)


class BenchmarkState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


BENCHMARK_OPEN = frozenset({BenchmarkState.QUEUED, BenchmarkState.RUNNING})
BENCHMARK_TONE: Mapping[BenchmarkState, Tone] = MappingProxyType(
    {
        BenchmarkState.QUEUED: Tone.IDLE,
        BenchmarkState.RUNNING: Tone.MOVING,
        BenchmarkState.DONE: Tone.OK,
        BenchmarkState.FAILED: Tone.BAD,
        BenchmarkState.CANCELLED: Tone.IDLE,
    }
)


@dataclass(frozen=True, slots=True)
class BenchmarkKey:
    """`version` and `workload` are digests. `fingerprint` covers machines and engine software, without the version's
    own fields. `slo` is its text. `split`: number of cells per role; empty: all are mixed."""

    version: str
    instance_type: str
    fingerprint: str
    workload: str
    slo: str
    seed: int
    split: str = ""

    @property
    def digest(self) -> str:
        return digest_of([self.version, *self._conditions])

    @property
    def conditions(self) -> str:
        """Digest of everything but the version."""
        return digest_of(self._conditions)

    @property
    def _conditions(self) -> list[Any]:
        own = [self.instance_type, self.fingerprint, self.workload, self.slo, self.seed]
        return [*own, self.split] if self.split else own


@dataclass(frozen=True, slots=True)
class ComparedGoodput:
    """Two versions under the same conditions: requests per second and cell, 0 if no rate held. `label`: workload and
    objective."""

    label: str
    before: float
    after: float


def version_digest(spec: VersionSpec, instance_type: str) -> str:
    """Digest of everything that a cell of a version computes with on an instance type, without the version's name.
    Raises InvalidVersion if it does not name this instance type."""
    spec = spec.on(instance_type)
    return digest_of(
        {
            "model": spec.model,
            "engine": spec.engine,
            "artifact": spec.artifact_digest or spec.artifact_uri,
            "context_length": spec.context_length,
            "max_concurrency": spec.max_concurrency,
            "parallelism": dict(spec.parallelism[instance_type]),
            "options": dict(spec.engine_options),
            "env": dict(spec.engine_env),
            "speculation": dict(spec.speculation),
            "quantization": dict(spec.quantization),
            "adapters": [dict(adapter) for adapter in spec.adapters],
            **({"roles": dict(spec.roles)} if spec.roles else {}),
        }
    )
