"""Patches for speculative decoding in vLLM 0.32, applied in each process that has a worker (`patched_worker`). Medusa
predicts fewer tokens where the schedule by batch size says so, which vLLM only asserts against. A Medusa checkpoint
with a reduced vocabulary loads, which vLLM rejects as incomplete. N-gram lookup compiles while the model loads instead
of during the first request. Predictions never change the text, and no file of vLLM is changed."""

from collections.abc import Callable, Iterable
from typing import Any

EXTENSION = "engine_agent.engines.vllm.patched_worker.PatchedWorker"
PATCHED_METHODS = frozenset({"medusa", "ngram"})
WARM_UP_TEXT = (1, 2, 3, 4, 5, 6, 7, 8) * 4
"""Repeating token ids, so that a lookup finds a match."""


def propose_up_to(proposer: Any, count: int, hidden_states: Any) -> Any:
    """Returns predictions of the first `count` Medusa heads, of shape (sequences, count); `count` may be 0."""
    import torch

    if count == 0:
        return torch.empty((hidden_states.shape[0], 0), dtype=torch.int64, device=hidden_states.device)
    heads = proposer.model(hidden_states)[:count]
    return torch.stack([logits.argmax(dim=-1) for logits in proposer.model.compute_logits(heads)], dim=1)


def patch_medusa(proposer: Any, model: Any) -> None:
    """Lets Medusa predict fewer tokens than it has heads, and load a checkpoint with a token map."""
    load_weights: Callable[..., set[str]] = model.load_weights

    def propose(self: Any, num_speculative_tokens: int, target_hidden_states: Any, *args: Any, **named: Any) -> Any:
        return propose_up_to(self, num_speculative_tokens, target_hidden_states)

    def load(self: Any, weights: Iterable[tuple[str, Any]]) -> set[str]:
        loaded = load_weights(self, weights)
        return loaded if self.token_map is None else loaded | {"token_map"}

    proposer.propose = propose
    model.load_weights = load


def warm_up_ngram(proposer: Any) -> None:
    """Compiles lookups where a model would be loaded. vLLM's own warm-up passes empty sequences, for which the function
    to compile is not called: the first request would wait for more than a minute."""

    def load_model(self: Any, *args: Any, **named: Any) -> None:
        import numpy

        text = numpy.zeros((1, self.max_model_len), dtype=numpy.int32)
        length = min(len(WARM_UP_TEXT), self.max_model_len - 1)
        text[0, :length] = WARM_UP_TEXT[:length]
        self.propose(self.k, [[WARM_UP_TEXT[0]]], numpy.array([length], dtype=numpy.int32), text)

    proposer.load_model = load_model


def patch_proposers() -> None:
    from vllm.model_executor.models.medusa import Medusa
    from vllm.v1.spec_decode.medusa import MedusaProposer
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    patch_medusa(MedusaProposer, Medusa)
    warm_up_ngram(NgramProposer)
