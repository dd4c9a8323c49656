"""One rank of a cell that runs NxDI's own Llama on CPU, as vLLM's plugin drives it: requests enter slots of the cache
one by one and are answered together. `bench.models.neuron_on_cpu` starts it in a Python with torch.

All of NxDI is real: configuration, model, sharding of weights, attention, cache, sampling, and the collectives of its
CPU mode (gloo). Only the parts of a device have stand-ins: compiler, runtime and kernels."""

import argparse
import importlib
import importlib.util
import json
import os
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.models.neuron_classes import make_importable

CONTEXT, SLOTS = 64, 4
MODEL: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
ROPE_THETA = 10_000.0
SPREAD, SEED = 0.3, 7
"""Of the weights: large enough that greedy text does not repeat itself."""


@dataclass(frozen=True, slots=True)
class Request:
    step: int
    prompt: tuple[int, ...]
    tokens: int


REQUESTS = (
    Request(0, (5, 6, 7, 8, 9), 24),
    Request(0, (40, 41), 6),
    Request(1, (100, 3, 99, 4, 98, 5, 97, 6, 96, 7, 95, 8, 94, 9, 93, 10, 92, 11, 91, 12), 30),
    Request(3, (11, 11, 11, 11, 11, 11), 20),
    Request(4, (200, 150, 101), 16),
    Request(5, (17, 18, 19, 20, 21, 22, 23, 24, 25), 24),
)
"""Two more than there are slots, so that slots are used again, by texts of other lengths."""

Prefill = Callable[[int, Sequence[int]], int]
"""Slot and prompt -> first token."""
Decode = Callable[[Sequence[tuple[int, int, int]]], Sequence[int]]
"""Slot, last token and its position of each unfinished text -> next tokens."""


def serve(requests: Sequence[Request], slots: int, prefill: Prefill, decode: Decode) -> list[list[int]]:
    """Answer requests by continuous batching: read one when a slot is free, and decode all others together."""
    texts: list[list[int]] = [[] for _ in requests]
    running: dict[int, int] = {}
    waiting, step = list(range(len(requests))), 0
    while waiting or running:
        free = sorted(set(range(slots)) - running.keys())
        for slot in free:
            if waiting and requests[waiting[0]].step <= step:
                number = waiting.pop(0)
                texts[number].append(prefill(slot, requests[number].prompt))
                running[slot] = number
        running = {slot: number for slot, number in running.items() if len(texts[number]) < requests[number].tokens}
        if running:
            going = sorted(running.items())
            last = [(slot, texts[n][-1], len(requests[n].prompt) + len(texts[n]) - 1) for slot, n in going]
            for (_, number), token in zip(going, decode(last), strict=True):
                texts[number].append(token)
        running = {slot: number for slot, number in running.items() if len(texts[number]) < requests[number].tokens}
        step += 1
    return texts


def make_model(folder: Path) -> None:
    """Write the model's weights, and what transformers says after each prompt, greedily."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    model: Any = LlamaForCausalLM(LlamaConfig(**MODEL)).eval().float()
    for weights in model.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=SPREAD)
    model.save_pretrained(folder)
    model.generation_config.eos_token_id = None  # no token ends a text, as none does in `serve`
    texts = []
    for request in REQUESTS:
        prompt = torch.tensor([request.prompt])
        limits = {"max_new_tokens": request.tokens, "do_sample": False}
        generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), **limits)
        texts.append(generated[0, len(request.prompt) :].tolist())
    (folder / "expected.json").write_text(json.dumps(texts))


def stand_in_for_scipy() -> None:
    """NxD 0.17 imports one function of it, for a kernel; environments of vLLM on CPU do not have it."""
    if importlib.util.find_spec("scipy") is None:
        sys.modules["scipy"] = scipy = types.ModuleType("scipy")
        scipy.linalg = sys.modules["scipy.linalg"] = linalg = types.ModuleType("scipy.linalg")  # type: ignore[attr-defined]
        linalg.circulant = None  # type: ignore[attr-defined]


def load_cell(folder: Path, settings: dict[str, Any]) -> Any:
    import torch
    from transformers import generation

    # transformers 5 has dropped an alias, and keeps rope's base elsewhere
    generation.SampleDecoderOnlyOutput = generation.GenerateDecoderOnlyOutput
    importing = importlib.import_module
    llama: Any = importing("neuronx_distributed_inference.models.llama.modeling_llama")
    config: Any = importing("neuronx_distributed_inference.models.config")
    adapter: Any = importing("neuronx_distributed_inference.utils.hf_adapter")
    read = adapter.load_pretrained_config(str(folder))

    def load(self: Any) -> None:
        read(self)
        self.rope_theta, self.rope_scaling = ROPE_THETA, None

    base: Any = importing("neuronx_distributed_inference.models.model_base").NeuronBaseForCausalLM
    if not hasattr(base, "_get_captured_tensors_offset"):  # 0.8.0 calls it on CPU alone; without captures 0.9.0 says 0
        base._get_captured_tensors_offset = lambda self: 0
    neuron = config.NeuronConfig(**settings, on_cpu=True, torch_dtype=torch.float32)
    model = llama.NeuronLlamaForCausalLM(str(folder), llama.LlamaInferenceConfig(neuron, load_config=load))
    model.to_cpu()
    return model


def steps_of(model: Any) -> tuple[Prefill, Decode]:
    """The calls of the plugin: one prompt into its slot, then a token for each unfinished slot."""
    import torch

    sampling: Any = importlib.import_module("neuronx_distributed_inference.modules.generation.sampling")

    def run(ids: list[list[int]], mask: list[list[int]], positions: list[list[int]], slots: list[int]) -> list[int]:
        greedy = sampling.prepare_sampling_params(batch_size=len(slots), top_k=[1], top_p=[1.0], temperature=[1.0])
        tensors = [torch.tensor(each) for each in (ids, mask, positions, slots)]
        names = ("input_ids", "attention_mask", "position_ids", "seq_ids")
        generated = model(**dict(zip(names, tensors, strict=True)), sampling_params=greedy)
        tokens = generated.tokens.reshape(-1) if generated.logits is None else generated.logits[:, -1].argmax(-1)
        return [int(token) for token in tokens[: len(slots)]]

    def prefill(slot: int, prompt: Sequence[int]) -> int:
        length = len(prompt)
        return run([list(prompt)], [[1] * length], [list(range(length))], [slot])[0]

    def decode(last: Sequence[tuple[int, int, int]]) -> list[int]:
        longest = max(position for _, _, position in last) + 1
        mask = [[int(place < position) for place in range(longest)] for _, _, position in last]
        slots, tokens, places = (list(column) for column in zip(*last, strict=True))
        return run([[token] for token in tokens], mask, [[place] for place in places], slots)

    return prefill, decode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--make", action="store_true")
    for name in ("--nxdi", "--nxd", "--platform", "--settings"):
        parser.add_argument(name)
    options = parser.parse_args()
    if options.make:
        make_model(options.folder)
        return 0
    import torch
    import transformers

    del transformers  # before the stand-ins: it looks for packages by their names
    torch.set_num_threads(1)
    make_importable(Path(options.nxdi), Path(options.nxd), options.platform)
    stand_in_for_scipy()
    row: dict[str, Any] = {}
    try:
        prefill, decode = steps_of(load_cell(options.folder, json.loads(options.settings)))
        row["texts"] = serve(REQUESTS, SLOTS, prefill, decode)
    except Exception as error:  # whatever NxDI says is what is written down
        row["ends"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if os.environ.get("RANK", "0") == "0":
        print("ROW " + json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # gloo's threads would wait for ranks that have ended
