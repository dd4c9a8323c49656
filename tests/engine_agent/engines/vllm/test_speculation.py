"""Speculation from the registry's fields to a real engine: drafts are made and right, and no text changes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from engine_agent.protocol.messages import Artifact
from tests.engine_agent.engines.vllm.forks import Begin
from tests.engine_agent.engines.vllm.random_heads import random_eagle, random_eagle3, random_heads
from tests.engine_agent.engines.vllm.running_cell import PROMPTS, TOKENS, RunningCell, plan_of, running_cell

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(1800)]


def test_a_draft_model_speeds_a_version_up_and_changes_no_text(
    small: Artifact, forked: Begin, texts: dict[str, str], tmp_path: Path
) -> None:
    itself = {"method": "draft_model", "tokens": 3, "draft_uri": small.uri, "draft_digest": small.digest}
    with running_cell(plan_of(small, speculation=itself), tmp_path / "logs", nodes=1, begin=forked) as engine:
        assert engine.texts(PROMPTS[::6], TOKENS).items() <= texts.items()
        drafts = engine.metric("vllm:spec_decode_num_drafts_total")
        assert engine.metric("vllm:spec_decode_num_accepted_tokens_total") / drafts > 2.0


@pytest.mark.parametrize("nodes", [1, 2])
def test_heads_guess_less_in_larger_batches_down_to_nothing_and_change_no_text(
    small: Artifact, forked: Begin, texts: dict[str, str], tmp_path: Path, nodes: int
) -> None:
    """All prompts together, then four, then one: batches of each range, and guesses again after none were made. The
    checkpoint has a reduced vocabulary, which vLLM alone does not load."""
    heads = random_heads(tmp_path / "heads", Path(small.uri.removeprefix("file://")))
    stated = {
        "method": "medusa", "tokens": 2, "draft_uri": heads.uri, "draft_digest": heads.digest,
        "tokens_per_batch_size": [[1, 2, 2], [3, 5, 1], [6, 16, 0]],
    }  # fmt: skip
    plan = plan_of(small, nodes=nodes, speculation=stated)
    with running_cell(plan, tmp_path / "logs", nodes=nodes, begin=forked) as engine:
        assert engine.texts(PROMPTS, TOKENS) == texts
        before = guesses(engine)
        assert engine.complete(prompt=list(PROMPTS[:4]), max_tokens=TOKENS)["text"] == texts[PROMPTS[0]]
        drafts, guessed = (now - then for now, then in zip(guesses(engine), before, strict=True))
        assert 0 < guessed < 2 * drafts, "most of the time there were four, with one token each"
        before = guesses(engine)
        assert engine.texts(PROMPTS[:1], TOKENS).items() <= texts.items()
        drafts, guessed = (now - then for now, then in zip(guesses(engine), before, strict=True))
        assert 0 < guessed == 2 * drafts


@pytest.mark.parametrize(("method", "made"), [("eagle", random_eagle), ("eagle3", random_eagle3)])
def test_a_layer_on_the_models_features_guesses_and_changes_no_text(
    small: Artifact,
    forked: Begin,
    texts: dict[str, str],
    tmp_path: Path,
    method: str,
    made: Callable[[Path, Path], Artifact],
) -> None:
    """All prompts together, where nothing is guessed, then one."""
    draft = made(tmp_path / "draft", Path(small.uri.removeprefix("file://")))
    stated = {
        "method": method, "tokens": 3, "draft_uri": draft.uri, "draft_digest": draft.digest,
        "tokens_per_batch_size": [[1, 4, 3], [5, 16, 0]],
    }  # fmt: skip
    with running_cell(plan_of(small, speculation=stated), tmp_path / "logs", nodes=1, begin=forked) as engine:
        assert engine.texts(PROMPTS, TOKENS) == texts
        before = guesses(engine)
        assert engine.texts(PROMPTS[:1], TOKENS).items() <= texts.items()
        drafts, guessed = (now - then for now, then in zip(guesses(engine), before, strict=True))
        assert 0 < guessed == 3 * drafts


def guesses(engine: RunningCell) -> tuple[float, float]:
    names = ("num_drafts", "num_draft_tokens")
    drafts, tokens = (engine.metric(f"vllm:spec_decode_{name}_total") for name in names)
    return drafts, tokens


def test_lookups_are_compiled_before_the_first_request(
    small: Artifact, forked: Begin, texts: dict[str, str], tmp_path: Path
) -> None:
    stated = {"method": "ngram", "tokens": 3, "tokens_per_batch_size": [[1, 2, 3], [3, 16, 0]]}
    with running_cell(plan_of(small, speculation=stated), tmp_path / "logs", nodes=1, begin=forked) as engine:
        assert engine.texts(PROMPTS, TOKENS) == texts
        assert engine.texts(PROMPTS[-1:], TOKENS).items() <= texts.items()
        assert engine.metric("vllm:spec_decode_num_accepted_tokens_total") > 0
