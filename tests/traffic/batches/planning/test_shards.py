"""Shards of an input: their order, limits and errors, and the comparison of IDs across shards."""

import io
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.traffic.batches.planning.test_lines import CHAT, encoded, line
from traffic.batches.planning import shards
from traffic.batches.planning.batch import BatchSettings
from traffic.batches.planning.lines import sent_body
from traffic.batches.planning.shards import ID_RECORD, ShardIndex, ShardPlace, plan_comparison, repeated_lines
from traffic.batches.services.validation import bounded_lines


def indexed(*texts: bytes, endpoint: str = CHAT, place: ShardPlace | None = None, **bounds: int) -> ShardIndex:
    index = ShardIndex(endpoint=endpoint, salt=b"salt", settings=BatchSettings(**bounds), place=place)
    for text in texts:
        if index.is_full:
            break
        index.add(text, index.end + len(text) + 1)
    return index


def ids_in_order(index: ShardIndex) -> list[str]:
    return [sent_body(text)[0] for _, text in index.texts_in_order()]


def test_errors_have_the_line_of_the_file_and_empty_lines_count() -> None:
    index = indexed(*encoded(line("a")), b"", *encoded(line("a"), line("b", model="n")), b"{")
    assert [(error.code, error.line) for error in index.errors] == [
        ("duplicate_custom_id", 3),
        ("invalid_json_line", 5),
    ]


def test_too_many_lines_are_one_error_and_end_the_shard() -> None:
    over = indexed(*encoded(*(line(str(number)) for number in range(9))), max_lines=4)
    assert [(error.code, error.line) for error in over.errors] == [("too_many_tasks", None)]
    assert (over.is_full, over.numbered) == (True, 5)
    bad = indexed(*([b"{"] * 9), max_error_lines=2)
    assert (len(bad.errors), bad.errors_in_all) == (2, 2)


def test_inputs_of_embeddings_count_together() -> None:
    body = {"model": "m", "input": ["x"] * 30}
    texts = encoded(*({"custom_id": name, "method": "POST", "url": "/v1/embeddings", "body": body} for name in "ab"))
    index = indexed(*texts, endpoint="/v1/embeddings", max_lines=50)
    assert [(error.code, error.line) for error in index.errors] == [("too_many_tasks", 2)]
    later = indexed(texts[0], endpoint="/v1/embeddings", max_lines=50, place=ShardPlace(inputs=30))
    assert [error.code for error in later.errors] == ["too_many_tasks"]


def test_a_batch_has_several_models_up_to_a_limit() -> None:
    texts = encoded(line("a", model="m"), line("b", model="n"), line("c", model="m"), line("d", model="o"))
    index = indexed(*texts, max_models=2)
    assert (index.models, index.first_lines) == ({"m": 2, "n": 1}, {"m": 1, "n": 2})
    assert [(error.code, error.line, error.param) for error in index.errors] == [("too_many_models", 4, "body.model")]
    later = indexed(texts[3], max_models=2, place=ShardPlace(numbered=9, lines=9, models={"m": 8, "n": 1}))
    assert [(error.code, error.line) for error in later.errors] == [("too_many_models", 10)]


def test_a_shard_ends_at_its_lines_or_bytes_and_the_next_one_continues() -> None:
    texts = encoded(*(line(str(number)) for number in range(9)))
    first = indexed(*texts, shard_lines=4)
    assert (len(first), first.end) == (4, sum(len(text) + 1 for text in texts[:4]))
    ((_, written),) = indexed(texts[0]).texts_in_order()
    assert len(indexed(*texts, shard_bytes=2 * len(written))) == 2
    place = ShardPlace(first.end, first.numbered, len(first), first.inputs, first.models)
    second = indexed(*texts[4:], place=place)
    assert (second.numbered, second.end) == (9, sum(len(text) + 1 for text in texts))


@given(
    st.lists(
        st.tuples(st.sampled_from(["p", "q", "r"]), st.integers(0, 5), st.integers(0, 3), st.sampled_from(["m", "n"])),
        max_size=40,
    )
)
def test_every_line_is_sent_and_those_that_share_a_model_or_a_beginning_together(
    shape: list[tuple[str, int, int, str]],
) -> None:
    lines = [
        line(str(number), first * 300 + second * 1000 * "s", max_tokens=tokens, model=model)
        for number, (first, second, tokens, model) in enumerate(shape)
    ]
    index = indexed(*encoded(*lines))
    order = [int(name) for name in ids_in_order(index)]
    assert sorted(order) == list(range(len(lines)))
    models = [model for model, _ in groupby(model for model, _ in index.texts_in_order())]
    assert len(models) == len(set(models))
    for letters in (256, 1024):
        bodies: list[dict[str, Any]] = [lines[place]["body"] for place in order]
        starts = [(body["model"], body["messages"][0]["content"][: letters - 10]) for body in bodies]
        runs = [start for start, _ in groupby(starts)]
        assert len(runs) == len(set(runs)), "lines with a common prefix are adjacent"


def test_beginnings_with_long_outputs_go_first() -> None:
    texts = encoded(line("a", "x" * 300, max_tokens=1), line("b", "y" * 300, max_tokens=900), line("c", "y" * 300))
    assert ids_in_order(indexed(*texts))[:2] == ["b", "c"]


@given(st.lists(st.binary(max_size=30).map(lambda text: text.replace(b"\n", b"")), max_size=12), st.integers(1, 20))
def test_lines_are_read_in_bounds_wherever_they_end(lines: list[bytes], most: int) -> None:
    content = b"\n".join(lines)
    start, found = 0, list(bounded_lines(io.BytesIO(content), most))
    for end, text in found:
        whole = content[start:end].removesuffix(b"\n")
        assert text == whole.rstrip(b"\r") or (len(text) > most and whole.startswith(text[:most]))
        start = end
    assert start == len(content)
    assert len(found) == len(io.BytesIO(content).readlines())


@pytest.mark.parametrize("compared", [1, 3, 500_000])
@given(ids=st.lists(st.lists(st.integers(0, 30), unique=True, max_size=12), max_size=5))
def test_an_id_of_an_earlier_shard_is_found_whatever_fits_into_memory(ids: list[list[int]], compared: int) -> None:
    files, ends, repeated, seen, number = [], [], [], set(), 0
    for shard in ids:
        index = indexed(*encoded(*(line(str(name)) for name in shard)), place=ShardPlace(numbered=number))
        for offset, name in enumerate(shard, number + 1):
            if name in seen:
                repeated.append(offset)
            seen.add(name)
        number = index.numbered
        records, slice_ends = index.id_records()
        files.append(records)
        ends.append(slice_ends)
    found: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "LINES_COMPARED", compared)
        for group in plan_comparison(ends):
            parts = (
                records[first * ID_RECORD.size : end * ID_RECORD.size]
                for records, (first, end) in zip(files, group, strict=True)
            )
            found += repeated_lines(parts)
    assert sorted(found) == repeated
