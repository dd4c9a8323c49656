"""Medusa heads: one residual block each behind the model's last hidden state, read by the model's LM head; and their
checkpoint as vLLM reads it.

Head i, counted from 0, predicts the token i + 1 behind the one that the LM head takes from the same state
(https://arxiv.org/abs/2401.10774, section 2.1). Only the blocks are trained. The LM head is cut to the most frequent
tokens, which makes a prediction cheap. A checkpoint is an artifact: its folder appears complete and never changes."""

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from engine_agent.engines.artifacts import describe_folder, write_manifest
from engine_agent.engines.medusa.capture import Answer, OutOfTime
from engine_agent.protocol.manifest import DIGEST_PREFIX, Manifest

Say = Callable[[str], None]
IGNORED = -100
"""A target that `torch.nn.functional.cross_entropy` ignores."""


@dataclass(frozen=True)
class TrainingRules:
    """`decay`: how much less each further head counts, as in the paper; `rate`: the highest of a one-cycle schedule."""

    heads: int = 4
    epochs: int = 8
    positions: int = 512
    rate: float = 2e-3
    decay: float = 0.8
    seed: int = 0


class MedusaHeads(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    """The blocks; `lm_head`: rows of the model's LM head for the tokens of `vocabulary`."""

    def __init__(self, heads: int, lm_head: Any, vocabulary: Any) -> None:
        super().__init__()
        size = lm_head.shape[1]
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(size, size, bias=False) for _ in range(heads))
        for block in self.blocks:
            torch.nn.init.zeros_(block.weight)
        self.register_buffer("lm_head", lm_head)
        self.register_buffer("vocabulary", vocabulary)

    def forward(self, states: Any) -> list[Any]:
        """Returns logits over the vocabulary, by head."""
        return [functional.linear(states + functional.silu(block(states)), self.lm_head) for block in self.blocks]


def vocabulary_of(answers: Iterable[Answer], size: int, whole: int) -> Any:
    """Returns the `size` most frequent tokens, ordered by number; filled up with the lowest numbers that do not
    occur."""
    seen = Counter(token for answer in answers for token in answer.tokens.tolist())
    size = min(size, whole)
    chosen = [token for token, _ in seen.most_common(size)]
    missing = (token for token in range(whole) if token not in seen)
    chosen += [token for token, _ in zip(missing, range(size - len(chosen)), strict=False)]
    return torch.tensor(sorted(chosen))


def training_rows(answers: Sequence[Answer], heads: int, vocabulary: Any, whole: int) -> tuple[Any, Any]:
    """Returns the states of all positions, and for each position and head the index in the vocabulary of the token to
    predict, or `IGNORED` if there is none."""
    place = torch.full((whole,), IGNORED)
    place[vocabulary] = torch.arange(len(vocabulary))
    wanted = []
    for answer in answers:
        behind = torch.cat((place[answer.tokens], torch.full((heads,), IGNORED)))
        wanted.append(torch.stack([behind[head + 1 : head + 1 + len(answer.tokens)] for head in range(heads)], dim=1))
    return torch.cat([answer.states for answer in answers]), torch.cat(wanted)


def train(
    heads: MedusaHeads, states: Any, wanted: Any, rules: TrainingRules, file: Path, until_s: float, say: Say
) -> None:
    """Trains the blocks. After each epoch `file` has everything that is needed to continue. Raises OutOfTime if some
    epochs are missing."""
    optimizer = torch.optim.AdamW(heads.blocks.parameters(), lr=rules.rate)
    batches = (len(states) + rules.positions - 1) // rules.positions
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rules.rate, total_steps=batches * rules.epochs)
    done = _resume(heads, optimizer, schedule, file)
    for epoch in range(done, rules.epochs):
        began, lost = time.monotonic(), 0.0
        order = torch.randperm(len(states), generator=torch.Generator().manual_seed(rules.seed + epoch))
        for batch in order.split(rules.positions):
            loss = _loss(heads, states[batch].to(heads.lm_head.device), wanted[batch].to(heads.lm_head.device), rules)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            lost += float(loss.detach())
        kept = {"epoch": epoch + 1, "blocks": heads.blocks.state_dict()}
        kept |= {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        torch.save(kept, file.with_suffix(".unfinished"))
        os.replace(file.with_suffix(".unfinished"), file)
        say(f"epoch {epoch + 1} of {rules.epochs}: loss {lost / batches:.3f}, {time.monotonic() - began:.0f} s")
        if time.monotonic() > until_s and epoch + 1 < rules.epochs:
            raise OutOfTime(f"{epoch + 1} of {rules.epochs} epochs are trained")


def _resume(heads: MedusaHeads, optimizer: Any, schedule: Any, file: Path) -> int:
    if not file.exists():
        return 0
    kept = torch.load(file, weights_only=True)
    heads.blocks.load_state_dict(kept["blocks"])
    optimizer.load_state_dict(kept["optimizer"])
    schedule.load_state_dict(kept["schedule"])
    return int(kept["epoch"])


def _loss(heads: MedusaHeads, states: Any, wanted: Any, rules: TrainingRules) -> Any:
    total = torch.zeros((), device=states.device)
    for head, logits in enumerate(heads(states)):
        if bool((wanted[:, head] != IGNORED).any()):
            total = total + rules.decay**head * functional.cross_entropy(logits, wanted[:, head], ignore_index=IGNORED)
    return total


@torch.inference_mode()  # type: ignore[untyped-decorator]  # torch has no types here
def ranks_of(heads: MedusaHeads, answer: Answer, top_k: int, whole: int) -> str:
    """Returns at which rank each head is right, position by position: one digit for each head, or `-` if it is not
    among the first `top_k`, 10 at most. Positions behind the end of an answer count as wrong. The rank is the number of
    other tokens with a higher logit, the order in which a decoder would take them."""
    count = len(heads.blocks)
    states, wanted = training_rows([answer], count, heads.vocabulary.cpu(), whole)
    logits = heads(states.to(heads.lm_head.device))
    columns = []
    for head in range(count):
        target = wanted[:, head].to(logits[head].device)
        own = logits[head].gather(1, target.clamp(min=0)[:, None])
        rank = (logits[head] > own).sum(1)
        columns.append(torch.where((target == IGNORED) | (rank >= top_k), -1, rank).cpu())
    return "".join("-" if rank < 0 else str(rank) for row in torch.stack(columns, 1).tolist() for rank in row)


CALIBRATION_NAME = "calibration.json"


def write_heads(
    heads: MedusaHeads, whole_vocabulary: int, calibration: Mapping[str, Any], name: str, output: Path
) -> tuple[Path, Manifest]:
    """Returns the artifact's folder, `<output>/<name>-<digest>`, and its manifest. The digest of the weights is added
    to `calibration` as `heads_sha256`."""
    from safetensors.torch import save_file

    unfinished = output / f".unfinished-{name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    tensors = {f"blocks.{number}.layers.0.weight": block.weight for number, block in enumerate(heads.blocks)}
    tensors |= {"lm_heads.0.weight": heads.lm_head, "token_map": heads.vocabulary}
    save_file(
        {key: value.detach().cpu().contiguous() for key, value in tensors.items()}, unfinished / "model.safetensors"
    )
    config = _config(heads, whole_vocabulary)
    (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = describe_folder(unfinished, {}).files["model.safetensors"]
    (unfinished / CALIBRATION_NAME).write_text(json.dumps({**calibration, "heads_sha256": weights}, indent=1) + "\n")
    source = {"model": str(calibration["model"]), "trainer": "engine_agent.engines.medusa"}
    manifest = describe_folder(unfinished, source)
    write_manifest(unfinished, manifest)
    for path, mode in ((unfinished, 0o755), *((path, 0o644) for path in unfinished.iterdir())):
        path.chmod(mode)  # engines run as other accounts, and no content is secret
    folder = output / f"{name}-{manifest.digest.removeprefix(DIGEST_PREFIX)[:12]}"
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(unfinished, folder)
    return folder, manifest


def _config(heads: MedusaHeads, whole_vocabulary: int) -> dict[str, Any]:
    """As vLLM's `MedusaConfig` reads it: it takes any key that contains "num" and "heads" for `num_heads`, so there
    must be no other."""
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": heads.lm_head.shape[1],
        "vocab_size": whole_vocabulary,
        "truncated_vocab_size": len(heads.vocabulary),
        "original_lm_head": True,
        "num_heads": len(heads.blocks),
        "num_hidden_layers": 1,
    }
