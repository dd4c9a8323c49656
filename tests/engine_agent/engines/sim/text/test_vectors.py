"""Embeddings, and log probabilities of tokens."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.engines.sim.api.pooling import embedding, similarity
from engine_agent.engines.sim.planning.vocabulary import ranked_tokens


@given(st.text(), st.integers(1, 400))
def test_every_text_has_a_unit_vector(text: str, dimensions: int) -> None:
    vector = embedding(text, dimensions)

    assert len(vector) == dimensions
    assert math.fsum(value * value for value in vector) == pytest.approx(1)
    assert vector == embedding(text, dimensions)


def test_words_in_common_bring_texts_nearer() -> None:
    sea = embedding("The sea is deep and blue.")

    same, near, far = (
        embedding(text) for text in ("the SEA is deep and blue", "the lake is deep and blue", "ten oak trees")
    )

    assert similarity(sea, same) == pytest.approx(1)
    assert 0.5 < similarity(sea, near) < 0.99
    assert similarity(sea, far) < 0.2


@given(st.text(), st.integers(0, 9000), st.integers(0, 20))
def test_log_probabilities_fall_and_sum_to_at_most_one(text: str, index: int, others: int) -> None:
    ranked = ranked_tokens(text, index, others)

    logprobs = [one.logprob for one in ranked]
    assert ranked[0].text == text
    assert logprobs == sorted(logprobs, reverse=True)
    assert len({one.text for one in ranked}) == others + 1
    assert sum(map(math.exp, logprobs)) <= 1 + 1e-9
