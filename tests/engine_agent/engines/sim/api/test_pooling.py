"""Embeddings and rankings: requests and vectors."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_agent.engines.sim.api.pooling import embedding, parse_input, parse_rerank, similarity
from engine_agent.engines.sim.planning.vocabulary import ranked_tokens
from engine_agent.protocol.request_bodies import BadRequest


def test_what_is_only_read() -> None:
    embeddings = parse_input(b'{"model": "m", "input": ["a b", "c"], "encoding_format": "base64", "dimensions": 5}')
    ranking = parse_rerank(b'{"model": "m", "query": "q", "documents": ["a", {"text": "b c"}], "top_n": 1}')

    assert (embeddings.reads(), embeddings.is_base64, embeddings.dimensions) == ((2, 1), True, 5)
    assert (ranking.pairs, ranking.reads(), ranking.top_n) == (((0, 1), (0, 2)), (2, 3), 1)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        (b'"encoding_format": "float"', "input"),
        (b'"input": "x", "encoding_format": "bytes"', "encoding_format"),
        (b'"input": "x", "dimensions": 385', "dimensions"),
        (b'"input": [%s"x"]' % (b'"x",' * 2048), "input"),
        (b'"input": [%s"x"]' % (b'"%s",' % (b"a " * 500) * 700), "input"),
        (b'"messages": []', "messages"),
    ],
)
def test_an_embedding_that_cannot_be_is_refused_by_name(more: bytes, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_input(b'{"model": "m", %s}' % more)

    assert refused.value.param == param


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
