"""Bodies of embeddings and rankings."""

import pytest

from engine_agent.engines.sim.api.pooling import parse_input, parse_rerank
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
