"""Time of a decode step on a GPU by the number of tokens that it verifies.

    python bench/gpu/step_cost.py --out DIR

A randomly initialised decoder of the shape of Llama-3-8B in bf16, written with torch alone so that nothing else needs
to be there, with a KV cache of fixed size, replayed as a CUDA graph as engines run their decode steps. A step takes
`verified` tokens of each of `batch` sequences that have `context` tokens in the cache. Attention is over all of it
without a mask: a tree's mask changes which products count and not how many there are. Beside it, what four Medusa heads
cost on one hidden state of each sequence, with LM heads of their own, and with one of 32,000 and of 2,048 tokens.

It writes step_cost.json after every group, so that a run that is cut short leaves what it has. `--limit-s` bounds it.
The file is what `switchyard speculation calibrate --step-cost` takes, with guesses by heads of 32,000 tokens.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

Shape = dict[str, int]
SHAPES: dict[str, Shape] = {
    "llama-3-8b": {
        "hidden": 4096, "inner": 14336, "layers": 32, "heads": 32, "kv_heads": 8, "head": 128, "vocab": 128256
    },
    "tiny": {"hidden": 64, "inner": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head": 16, "vocab": 512},
}  # fmt: skip
VERIFIED = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
HEADS = 4
HEAD_VOCABULARIES = (0, 32000, 2048)
"""0: an LM head of the whole vocabulary for each head."""
GUESSING_VOCABULARY = 32000


def weight(rows: int, columns: int, device: str) -> Any:
    return torch.randn(rows, columns, device=device, dtype=torch.bfloat16) * columns**-0.5


class Decoder:
    def __init__(self, shape: Shape, device: str, most_tokens: int) -> None:
        self.shape, self.device = shape, device
        q, kv = shape["heads"] * shape["head"], shape["kv_heads"] * shape["head"]
        self.embed = weight(shape["vocab"], shape["hidden"], device)
        self.lm_head = weight(shape["vocab"], shape["hidden"], device)
        self.norm = torch.ones(shape["hidden"], device=device, dtype=torch.bfloat16)
        self.layers = [
            {
                "qkv": weight(q + 2 * kv, shape["hidden"], device),
                "out": weight(shape["hidden"], q, device),
                "up": weight(2 * shape["inner"], shape["hidden"], device),
                "down": weight(shape["hidden"], shape["inner"], device),
            }
            for _ in range(shape["layers"])
        ]
        turns = 500000.0 ** (-torch.arange(0, shape["head"], 2, device=device).float() / shape["head"])
        angles = torch.outer(torch.arange(most_tokens, device=device).float(), turns)
        self.cos, self.sin = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)

    def caches(self, batch: int, length: int) -> list[tuple[Any, Any]]:
        """Keys and values of each layer."""
        size = (batch, self.shape["kv_heads"], length, self.shape["head"])
        one = {"device": self.device, "dtype": torch.bfloat16}
        return [(torch.randn(size, **one), torch.randn(size, **one)) for _ in self.layers]

    def _rotated(self, x: Any, start: int, length: int) -> Any:
        first, second = x.chunk(2, dim=-1)
        cos, sin = self.cos[start : start + length], self.sin[start : start + length]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def step(self, tokens: Any, caches: list[tuple[Any, Any]], context: int) -> Any:
        """The next token behind each of `tokens`, of shape (batch, verified)."""
        shape = self.shape
        batch, verified = tokens.shape
        groups, end = shape["heads"] // shape["kv_heads"], context + verified
        x = functional.embedding(tokens, self.embed)
        for layer, (keys, values) in zip(self.layers, caches, strict=True):
            y = functional.rms_norm(x, (shape["hidden"],), self.norm, 1e-5)
            qkv = functional.linear(y, layer["qkv"]).view(batch, verified, -1, shape["head"]).transpose(1, 2)
            q, k, v = qkv.split([shape["heads"], shape["kv_heads"], shape["kv_heads"]], dim=1)
            keys[:, :, context:end] = self._rotated(k, context, verified)
            values[:, :, context:end] = v
            # The queries that share a KV head go as more queries of it: no copy of the cache.
            q = self._rotated(q, context, verified)
            q = q.reshape(batch, shape["kv_heads"], groups * verified, shape["head"])
            z = functional.scaled_dot_product_attention(q, keys[:, :, :end], values[:, :, :end])
            z = z.reshape(batch, shape["heads"], verified, shape["head"]).transpose(1, 2).reshape(batch, verified, -1)
            x = x + functional.linear(z, layer["out"])
            y = functional.rms_norm(x, (shape["hidden"],), self.norm, 1e-5)
            gate, up = functional.linear(y, layer["up"]).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, layer["down"])
        return functional.linear(functional.rms_norm(x, (shape["hidden"],), self.norm, 1e-5), self.lm_head).argmax(-1)


class Heads:
    """Four residual blocks and LM heads; `vocabulary` 0: each has one of the whole vocabulary."""

    def __init__(self, shape: Shape, device: str, vocabulary: int) -> None:
        self.blocks = [weight(shape["hidden"], shape["hidden"], device) for _ in range(HEADS)]
        rows = min(vocabulary or shape["vocab"], shape["vocab"])
        one = weight(rows, shape["hidden"], device)
        self.lm = [one if vocabulary else weight(rows, shape["hidden"], device) for _ in range(HEADS)]

    def guess(self, x: Any) -> Any:
        each = zip(self.blocks, self.lm, strict=True)
        found = [functional.linear(x + functional.silu(functional.linear(x, block)), lm) for block, lm in each]
        return torch.stack([logits.argmax(-1) for logits in found], 1)


def seconds_of(call: Callable[[], Any], device: str, budget_s: float) -> list[float]:
    """Seconds of single calls: 7 to 30 of them, of a captured graph where there is a GPU."""
    taken: list[float] = []
    if device == "cpu":
        for _ in range(3):
            began = time.perf_counter()
            call()
            taken.append(time.perf_counter() - began)
        return taken
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()
    began = time.perf_counter()
    while len(taken) < 30 and (len(taken) < 7 or time.perf_counter() - began < budget_s):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        taken.append(first.elapsed_time(last) / 1000)
    return taken


def row(taken: list[float], **named: Any) -> dict[str, Any]:
    """The median, and what nine of ten are above and below."""
    taken = sorted(taken)
    low, high = taken[len(taken) // 10], taken[-1 - len(taken) // 10]
    numbers = {"seconds": statistics.median(taken), "low": low, "high": high}
    return {**named, **{name: round(value, 7) for name, value in numbers.items()}, "runs": len(taken)}


class Run:
    """What was found, written down as it is found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.began, self.options = time.monotonic(), options
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.shape = SHAPES[options.shape]
        self.batches = [int(each) for each in options.batches.split(",")]
        self.contexts = [int(each) for each in options.contexts.split(",")]
        hardware = torch.cuda.get_device_name(0) if self.device == "cuda" else platform.machine()
        self.found: dict[str, Any] = {
            "instance_type": options.instance_type,
            "model": f"{options.shape}, random weights, bf16",
            "shape": self.shape,
            "hardware": hardware,
            "software": f"torch {torch.__version__}, CUDA {torch.version.cuda}, graph replay",
            "source": "measured",
            "steps": [],
            "heads": [],
            "skipped": [],
        }

    def save(self) -> None:
        self.found["wall_s"] = round(time.monotonic() - self.began, 1)
        self.options.out.mkdir(parents=True, exist_ok=True)
        (self.options.out / "step_cost.json").write_text(json.dumps(self.found, indent=1) + "\n")

    def is_late(self) -> bool:
        return bool(time.monotonic() - self.began > self.options.limit_s)

    def steps(self) -> None:
        """All steps, the widest last, so that a limit costs what is least needed."""
        decoder = Decoder(self.shape, self.device, max(self.contexts) + max(VERIFIED) + 1)
        for batch in self.batches:
            for context in self.contexts:
                self._steps_of(decoder, batch, context)
                if self.device == "cuda":
                    torch.cuda.empty_cache()
                self.save()
                print(f"batch {batch}, context {context}: {self.found['wall_s']} s", flush=True)

    def _steps_of(self, decoder: Decoder, batch: int, context: int) -> None:
        if self.is_late():
            self.found["skipped"].append({"batch": batch, "context": context})
            return
        caches = decoder.caches(batch, context + max(VERIFIED))
        for verified in VERIFIED:
            named = {"batch": batch, "context": context, "verified": verified}
            if self.is_late():
                self.found["skipped"].append(named)
                continue
            tokens = torch.randint(self.shape["vocab"], (batch, verified), device=self.device)
            taken = seconds_of(partial(decoder.step, tokens, caches, context), self.device, 0.35)
            self.found["steps"].append(row(taken, **named))

    def heads(self) -> None:
        for vocabulary in HEAD_VOCABULARIES:
            heads = Heads(self.shape, self.device, vocabulary)
            for batch in self.batches:
                x = torch.randn(batch, self.shape["hidden"], device=self.device, dtype=torch.bfloat16)
                taken = seconds_of(partial(heads.guess, x), self.device, 0.1)
                self.found["heads"].append(row(taken, batch=batch, heads=HEADS, vocabulary=vocabulary))
        chosen = [each for each in self.found["heads"] if each["vocabulary"] == GUESSING_VOCABULARY]
        self.found["guess"] = [{"batch": each["batch"], "seconds": each["seconds"]} for each in chosen]


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="folder for step_cost.json")
    parser.add_argument("--limit-s", type=float, default=200.0)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--instance-type", default="p5.48xlarge", help="of this machine")
    parser.add_argument("--batches", default="1,4,16,64")
    parser.add_argument("--contexts", default="512,2048")
    run = Run(parser.parse_args())
    torch.manual_seed(0)
    with torch.inference_mode():
        run.steps()
        run.heads()
    if run.device == "cuda":
        run.found["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    run.save()
    for each in run.found["steps"]:
        if each["verified"] in (1, 5, 16, 64):
            print({name: each[name] for name in ("batch", "context", "verified", "seconds")})
    print(run.found["heads"])
    print(f"done in {run.found['wall_s']} s, {len(run.found['steps'])} steps, {len(run.found['skipped'])} skipped")


if __name__ == "__main__":
    main(argparse.ArgumentParser(description=__doc__))
