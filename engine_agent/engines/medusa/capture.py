"""Captures a model's greedy answers to prompts: tokens, and the hidden state that each token came from. Heads must
learn how this model continues, so only its own answers are used, in the precision it is loaded in. A part of the
prompts is one file, which is complete or missing: an interrupted run continues with the first missing file."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine_agent.engines.medusa.prompts import Prompt

Say = Callable[[str], None]


class OutOfTime(Exception):
    """The time limit is reached and finished parts are on disk; the text states the progress."""


@dataclass(frozen=True)
class Answer:
    """`tokens[j]` was taken from `states[j]`, the hidden state of the token before it, as the LM head reads it."""

    tokens: Any
    states: Any


@dataclass(frozen=True)
class CaptureLimits:
    """`batch`: prompts at a time; `most_tokens`: of an answer; `until_s`: on `time.monotonic`."""

    batch: int = 32
    most_tokens: int = 96
    until_s: float = float("inf")


def capture(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], folder: Path, limits: CaptureLimits, say: Say
) -> list[Answer]:
    """Returns the model's answers to the prompts, in their order. Raises OutOfTime if some are missing."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [prompts[first : first + limits.batch] for first in range(0, len(prompts), limits.batch)]
    answers: list[Answer] = []
    began, fresh = time.monotonic(), 0
    for number, part in enumerate(parts):
        file = folder / f"{number:04d}.pt"
        if not file.exists():
            if time.monotonic() > limits.until_s:
                raise OutOfTime(f"{number} of {len(parts)} parts of {folder.name} are captured")
            found = answer_all(model, tokenizer, part, limits.most_tokens)
            _write_whole([(each.tokens, each.states.to(torch.float16)) for each in found], file)
            fresh += sum(len(each.tokens) for each in found)
            pace = fresh / max(1e-9, time.monotonic() - began)
            say(f"{folder.name}: part {number + 1} of {len(parts)}, {fresh} tokens now, {pace:.0f} tokens/s")
        stored = torch.load(file, weights_only=True)
        answers += [Answer(tokens, states.to(torch.float32)) for tokens, states in stored]
    return answers


def _write_whole(content: Any, file: Path) -> None:
    unfinished = file.with_suffix(".unfinished")
    torch.save(content, unfinished)
    os.replace(unfinished, file)


@torch.inference_mode()  # type: ignore[untyped-decorator]  # torch has no types here
def answer_all(model: Any, tokenizer: Any, prompts: Sequence[Prompt], most_tokens: int) -> list[Answer]:
    """Returns greedy answers to prompts of one family, computed as one batch."""
    texts = [as_text(tokenizer, prompt) for prompt in prompts]
    tokenizer.padding_side = "left"
    read = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
    ends = ends_of(tokenizer, is_chat=prompts[0].is_chat)
    tokens: list[list[int]] = [[] for _ in texts]
    states: list[list[Any]] = [[] for _ in texts]
    open_rows = set(range(len(texts)))
    for last_states, chosen in _steps(model, read["input_ids"], read["attention_mask"], most_tokens):
        for row in tuple(open_rows):
            token = int(chosen[row])
            tokens[row].append(token)
            states[row].append(last_states[row])
            if token in ends:
                open_rows.discard(row)
        if not open_rows:
            break
    return [Answer(torch.tensor(each), torch.stack(kept).cpu()) for each, kept in zip(tokens, states, strict=True)]


def _steps(model: Any, ids: Any, mask: Any, most: int) -> Iterator[tuple[Any, Any]]:
    decoder, cache = model.get_decoder(), None
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    for _ in range(most):
        found = decoder(input_ids=ids, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True)
        cache = found.past_key_values
        last_states = found.last_hidden_state[:, -1]
        chosen = model.lm_head(last_states).argmax(-1)
        yield last_states, chosen.tolist()
        ids, places = chosen[:, None], places[:, -1:] + 1
        mask = torch.cat((mask, mask.new_ones((mask.shape[0], 1))), dim=1)


def as_text(tokenizer: Any, prompt: Prompt) -> str:
    if not prompt.is_chat:
        return prompt.text
    messages = [{"role": "user", "content": prompt.text}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def ends_of(tokenizer: Any, *, is_chat: bool) -> set[int]:
    ends = {tokenizer.eos_token_id}
    if not is_chat:
        ends |= {number for word, number in tokenizer.get_vocab().items() if word.startswith("ĊĊ") or word == "\n\n"}
    return ends
