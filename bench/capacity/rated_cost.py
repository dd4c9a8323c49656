"""US dollars for a million generated tokens by instance type, from list prices and rated memory bandwidth.

A step of decoding reads the weights once and the cache of each sequence, so its rate is bounded by the bandwidth of the
devices' memory. The same model, batch and context are assumed for all types. These are bounds, not measurements: real
kernels reach a part of them, which differs by device and engine.

    .venv/bin/python -m bench rated_cost
    .venv/bin/python -m bench rated_cost --weights-gb 16 --batch 32"""

import argparse
from dataclasses import dataclass

from bench import table
from models_registry.instance_types.planner import INSTANCE_TYPES, NEURON

GB_PER_S = {
    "inferentia2": 820.0,
    "trainium": 820.0,
    "trainium2": 2900.0,
    "a10g": 600.0,
    "l40s": 864.0,
    "a100": 1555.0,
    "h100": 3350.0,
    "h200": 4800.0,
}
"""Memory bandwidth of a device. Neuron: AWS's pages on its hardware. NVIDIA: data sheets; the A100 has 40 GB."""
TYPES = (
    "inf2.48xlarge", "trn1.32xlarge", "trn2.48xlarge", "g5.48xlarge", "g6e.48xlarge", "p4d.24xlarge", "p5.48xlarge",
    "p5en.48xlarge",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Work:
    """`weights_gb`: of the model as stored. `cache_mb`: of a token in the cache."""

    weights_gb: float
    cache_mb: float
    batch: int
    context: int

    def needs_gb(self) -> float:
        return self.weights_gb + self.batch * self.context * self.cache_mb / 1000

    def tokens_per_s(self, gb_per_s: float) -> float:
        return self.batch * gb_per_s / self.needs_gb()


@dataclass(frozen=True, slots=True)
class Rated:
    name: str
    price_per_hour: float
    gb_per_s: float
    tokens_per_s: float
    is_neuron: bool

    @property
    def per_million(self) -> float:
        return self.price_per_hour / 3600 / self.tokens_per_s * 1e6


def rated(name: str, work: Work) -> Rated | None:
    """Returns the bound of a type, or None if the work does not fit into its memory or its price is unknown."""
    shape = INSTANCE_TYPES[name]
    if not shape.price_per_hour or (shape.memory_gib or 0) * 1.073 < work.needs_gb():
        return None
    gb_per_s = GB_PER_S[shape.accelerator] * shape.chips
    return Rated(name, shape.price_per_hour, gb_per_s, work.tokens_per_s(gb_per_s), shape.vendor == NEURON)


def report(found: list[Rated]) -> str:
    """The cheapest Neuron type is compared with each other one."""
    base = min((one for one in found if one.is_neuron), key=lambda one: one.per_million)
    rows = [
        [
            one.name, f"{one.price_per_hour:.2f}", f"{one.gb_per_s / 1000:.1f}", f"{one.tokens_per_s:,.0f}",
            f"{one.per_million:.2f}", f"{one.per_million / base.per_million:.2f}",
        ]
        for one in sorted(found, key=lambda one: one.per_million)
    ]  # fmt: skip
    return table(["type", "$/h", "TB/s", "tokens/s, bound", "$/M tokens, bound", f"to {base.name}"], rows)


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights-gb", type=float, default=70.0, help="default: 70 billion parameters in INT8")
    parser.add_argument("--cache-mb", type=float, default=0.328, help="of a token; default: Llama 70B in 16 bits")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=2048, help="tokens of each sequence")
    options = parser.parse_args()
    work = Work(options.weights_gb, options.cache_mb, options.batch, options.context)
    found = [one for name in TYPES if (one := rated(name, work)) is not None]
    print(f"{work.needs_gb():.0f} GB are read for each step of {work.batch} tokens")
    print(report(found))
